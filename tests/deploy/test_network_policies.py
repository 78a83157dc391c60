"""The evaluator of NetworkPolicies itself, against the rules that Kubernetes documents."""

from __future__ import annotations

from typing import Any

import pytest
from network_policies import End, entering, leaving

SERVER = End("a", {"name": "a"}, {"app": "server"}, ports={"http": 8000})
CLIENT = End("a", {"name": "a"}, {"app": "client"})
ELSEWHERE = End("b", {"name": "b"}, {"app": "client"})
OUTSIDE = End(address="203.0.113.7")


def policy(name: str = "p", **spec: Any) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "a"}, "spec": {"podSelector": {}, **spec}}


def peers(*found: dict[str, Any]) -> list[dict[str, Any]]:
    return [policy(podSelector={"matchLabels": {"app": "server"}}, ingress=[{"from": list(found)}])]


def test_without_a_policy_everything_is_open() -> None:
    assert entering([], OUTSIDE, SERVER, 1) == []
    assert leaving([], SERVER, OUTSIDE, 1) == []
    other = policy(podSelector={"matchLabels": {"app": "other"}})
    assert entering([other], OUTSIDE, SERVER, 1) == []


def test_a_selected_pod_is_closed_in_the_types_of_its_policies() -> None:
    closed = [policy()]
    assert entering(closed, CLIENT, SERVER, 1) is None
    assert leaving(closed, CLIENT, SERVER, 1) == [], "policyTypes left out, and no egress: Ingress alone"
    assert leaving([policy(egress=[{}])], CLIENT, SERVER, 1) == ["p"]
    assert leaving([policy(policyTypes=["Egress"])], CLIENT, SERVER, 1) is None
    assert entering([policy(policyTypes=["Egress"])], CLIENT, SERVER, 1) == []
    assert entering(closed, ELSEWHERE, ELSEWHERE, 1) == [], "a policy is of its own namespace only"


def test_policies_add_up() -> None:
    opens = policy("opens", ingress=[{"from": [{"podSelector": {"matchLabels": {"app": "client"}}}]}])
    assert entering([policy(), opens], CLIENT, SERVER, 1) == ["opens"]


@pytest.mark.parametrize(
    ("peer", "admitted"),
    [
        ({"podSelector": {}}, {"client"}),
        ({"namespaceSelector": {}}, {"client", "elsewhere"}),
        ({"namespaceSelector": {"matchLabels": {"name": "b"}}}, {"elsewhere"}),
        (
            {"namespaceSelector": {}, "podSelector": {"matchLabels": {"app": "client"}}},
            {"client", "elsewhere"},
        ),
        (
            {"namespaceSelector": {"matchLabels": {"name": "b"}}, "podSelector": {"matchLabels": {"x": "y"}}},
            set(),
        ),
        ({"ipBlock": {"cidr": "203.0.113.0/24"}}, {"outside"}),
        ({"ipBlock": {"cidr": "203.0.113.0/24", "except": ["203.0.113.7/32"]}}, set()),
        ({"ipBlock": {"cidr": "0.0.0.0/0"}}, {"client", "elsewhere", "outside"}),
    ],
)
def test_peers(peer: dict[str, Any], admitted: set[str]) -> None:
    ends = {"client": CLIENT, "elsewhere": ELSEWHERE, "outside": OUTSIDE}
    assert {name for name, end in ends.items() if entering(peers(peer), end, SERVER, 1)} == admitted


def test_no_peers_are_all_peers() -> None:
    assert entering(peers(), OUTSIDE, SERVER, 1) == ["p"]


@pytest.mark.parametrize(
    ("one", "port", "protocol", "fits"),
    [
        ({"port": 8000}, 8000, "TCP", True),
        ({"port": 8000}, 8001, "TCP", False),
        ({"port": 8000}, 8000, "UDP", False),
        ({"port": 53, "protocol": "UDP"}, 53, "UDP", True),
        ({"protocol": "UDP"}, 1, "UDP", True),
        ({"port": 10, "endPort": 20}, 20, "TCP", True),
        ({"port": 10, "endPort": 20}, 21, "TCP", False),
        ({"port": "http"}, 8000, "TCP", True),
        ({"port": "http"}, 8001, "TCP", False),
        ({"port": "metrics"}, 8000, "TCP", False),
    ],
)
def test_ports(one: dict[str, Any], port: int, protocol: str, fits: bool) -> None:
    found = entering([policy(ingress=[{"ports": [one]}])], CLIENT, SERVER, port, protocol)
    assert (found == ["p"]) == fits
