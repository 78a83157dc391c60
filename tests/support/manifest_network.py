"""Checks of who selects whom, and of who may talk to whom, by the NetworkPolicies of a rendered overlay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manifest_model import COMPONENT, Object, Rendered, matches

EPHEMERAL_PORT = 40000
"""Stands for a port that the system chooses."""
ALLOWED = (
    ("router", "head", "directory"),
    ("router", "node", EPHEMERAL_PORT),
    ("node", "router", "control"),
    ("head", "router", "control"),
    ("launch", "head", "dashboard"),
    ("node", "node", EPHEMERAL_PORT),
    ("node", "head", "gcs-server"),
    ("head", "node", EPHEMERAL_PORT),
)
FORBIDDEN = (
    ("router", "head", "dashboard"),
    ("router", "head", "gcs-server"),
    ("router", "node", 8080),
    ("router", "router", "control"),
    ("launch", "node", EPHEMERAL_PORT),
    ("launch", "head", "directory"),
    ("launch", "router", "control"),
    ("stranger", "head", "directory"),
    ("stranger", "head", "dashboard"),
    ("stranger", "node", EPHEMERAL_PORT),
    ("stranger", "router", "control"),
)


def check_selectors(rendered: Rendered) -> Iterator[str]:
    """Every selector matches a pod; a Service's ports are ports of all its pods."""
    for one in rendered.of("Service"):
        yield from _check_service(rendered, one)
    for kind in ("PodDisruptionBudget", "NetworkPolicy"):
        for one in rendered.of(kind):
            for selector in _selectors(one["spec"]):
                if not any(matches(selector, pod.labels) for pod in rendered.pods()):
                    yield f"{kind} {one['metadata']['name']}: {selector} matches no pod"
    for one in rendered.of("Deployment"):
        if not matches(one["spec"]["selector"], one["spec"]["template"]["metadata"]["labels"]):
            yield f"Deployment {one['metadata']['name']}: does not select its own pods"
    names = {(one["kind"], one["metadata"]["name"]) for one in rendered.objects}
    for one in rendered.of("HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        if (target["kind"], target["name"]) not in names:
            yield f"HorizontalPodAutoscaler: there is no {target['kind']} {target['name']}"


def _check_service(rendered: Rendered, service: Object) -> Iterator[str]:
    name, selector = service["metadata"]["name"], {"matchLabels": service["spec"]["selector"]}
    selected = [pod for pod in rendered.pods() if matches(selector, pod.labels)]
    if not selected:
        yield f"Service {name}: selects no pod"
    for pod in selected:
        ports = {port["name"] for port in pod.main.get("ports", ())}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in ports:
                yield f"Service {name}: {pod.name} has no port {port['targetPort']}"


def _selectors(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every pod selector within a spec."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
        if key in {"podSelector", "selector"}:
            yield inner
        elif isinstance(inner, dict | list):
            yield from _selectors(inner)


def check_network(rendered: Rendered) -> Iterator[str]:
    """Nothing is open but what is named, every pod is covered, and the ways that are needed are there."""
    policies = rendered.of("NetworkPolicy")
    closed = [one["spec"] for one in policies if one["spec"]["podSelector"] == {}]
    if not any(set(one["policyTypes"]) == {"Ingress", "Egress"} and len(one) == 2 for one in closed):
        yield "network: nothing denies what no policy names"
    for pod in rendered.pods():
        own = [one for one in policies if matches(one["spec"]["podSelector"], pod.labels)]
        if not any(one["spec"]["podSelector"] for one in own):
            yield f"network: no policy of its own for {pod.name}"
    for source, target, port in ALLOWED:
        if not _may(rendered, source, target, port):
            yield f"network: {source} may not reach {target} at {port}"
    for source, target, port in FORBIDDEN:
        if _may(rendered, source, target, port, egress=False):  # whatever the source's own policy says
            yield f"network: {source} may reach {target} at {port}"


def _may(rendered: Rendered, source: str, target: str, port: int | str, egress: bool = True) -> bool:
    labels = [pod.labels for pod in rendered.component(source)] or [{COMPONENT: source}]
    return any(
        _number(pod.main, port) is not None
        and _allows(rendered, "ingress", pod.labels, caller, _number(pod.main, port))
        and (not egress or _allows(rendered, "egress", caller, pod.labels, _number(pod.main, port)))
        for caller in labels
        for pod in rendered.component(target)
    )


def _number(container: Object, port: int | str) -> int | None:
    named = {one["name"]: one["containerPort"] for one in container.get("ports", ())}
    return port if isinstance(port, int) else named.get(port)


def _allows(
    rendered: Rendered, way: str, pod: Mapping[str, str], other: Mapping[str, str], port: int | None
) -> bool:
    side = "from" if way == "ingress" else "to"
    for one in rendered.of("NetworkPolicy"):
        if not matches(one["spec"]["podSelector"], pod):
            continue
        for rule in one["spec"].get(way, ()):
            peers = [peer["podSelector"] for peer in rule.get(side, ()) if "podSelector" in peer]
            if (side not in rule or any(matches(peer, other) for peer in peers)) and _covers(rule, port):
                return True
    return False


def _covers(rule: Object, port: int | None) -> bool:
    if "ports" not in rule:
        return True
    return any(one["port"] <= (port or 0) <= one.get("endPort", one["port"]) for one in rule["ports"])
