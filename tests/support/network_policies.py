"""Evaluates Kubernetes NetworkPolicies: may this end connect to that port of that pod?

The rules are those of networking.k8s.io/v1: policies only add up, and an end is open in a direction for which no
policy selects it. A connection needs both the source's egress and the target's ingress.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from manifest_model import matches

Policy = Mapping[str, Any]


@dataclass(frozen=True)
class End:
    """One end of a connection: a pod, or an address outside of the cluster (`namespace` empty)."""

    namespace: str = ""
    namespace_labels: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)
    address: str = "10.244.0.9"
    ports: Mapping[str, int] = field(default_factory=dict)
    """Named ports of its container."""


def entering(
    policies: Sequence[Policy], source: End, target: End, port: int, protocol: str = "TCP"
) -> list[str] | None:
    """The names of the policies by which the target takes the connection; None if it does not.

    Empty where nothing restricts the target's ingress.
    """
    return _admitting(policies, "Ingress", target, source, target, port, protocol)


def leaving(
    policies: Sequence[Policy], source: End, target: End, port: int, protocol: str = "TCP"
) -> list[str] | None:
    """As `entering`, for the source's egress. A connection needs both."""
    return _admitting(policies, "Egress", source, target, target, port, protocol)


def _admitting(
    policies: Sequence[Policy], way: str, own: End, other: End, target: End, port: int, protocol: str
) -> list[str] | None:
    selecting = [one for one in policies if _selects(one, own) and way in _types(one["spec"])]
    if not selecting:
        return []
    side = "from" if way == "Ingress" else "to"
    admitting = [
        str(one["metadata"]["name"])
        for one in selecting
        for rule in one["spec"].get(way.lower()) or ()
        if _peer_fits(rule.get(side), one, other) and _port_fits(rule.get("ports"), target, port, protocol)
    ]
    return admitting or None


def _selects(policy: Policy, end: End) -> bool:
    same = bool(end.namespace) and policy["metadata"]["namespace"] == end.namespace
    return same and matches(policy["spec"]["podSelector"], end.labels)


def _types(spec: Mapping[str, Any]) -> Sequence[str]:
    """Left out, it is Ingress, and Egress where there is a rule for it."""
    found: Sequence[str] = spec.get("policyTypes") or ["Ingress", *(["Egress"] if spec.get("egress") else [])]
    return found


def _peer_fits(peers: Sequence[Mapping[str, Any]] | None, policy: Policy, other: End) -> bool:
    return not peers or any(_is_peer(peer, policy, other) for peer in peers)


def _is_peer(peer: Mapping[str, Any], policy: Policy, other: End) -> bool:
    if "ipBlock" in peer:
        address, block = ipaddress.ip_address(other.address), peer["ipBlock"]
        inside = [address in ipaddress.ip_network(net) for net in (block["cidr"], *block.get("except", ()))]
        return inside[0] and not any(inside[1:])
    if not other.namespace:
        return False
    if "namespaceSelector" in peer:
        near = matches(peer["namespaceSelector"] or {}, other.namespace_labels)
    else:
        near = other.namespace == policy["metadata"]["namespace"]
    return near and matches(peer.get("podSelector") or {}, other.labels)


def _port_fits(ports: Sequence[Mapping[str, Any]] | None, target: End, port: int, protocol: str) -> bool:
    return not ports or any(_is_port(one, target, port, protocol) for one in ports)


def _is_port(one: Mapping[str, Any], target: End, port: int, protocol: str) -> bool:
    if one.get("protocol", "TCP") != protocol:
        return False
    first = one.get("port")
    if first is None:
        return True
    if isinstance(first, str):
        return target.ports.get(first) == port
    return int(first) <= port <= int(one.get("endPort", first))
