"""Checks of who selects whom, and of who may talk to whom, by the NetworkPolicies of a rendered overlay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from manifest_model import COMPONENT, Object, Rendered, matches
from network_policies import End, entering, leaving

CONTROL, AGENT, WORKER, RAYLET = 40000, 52365, 10002, 6380
"""A port that the system chooses (control channels of ranks, KV transport), and some of Ray's."""
OWN = "disagg"
NODES = frozenset({"head", "node"})
ENDS: dict[str, End] = {
    "stranger": End(OWN, {"kubernetes.io/metadata.name": OWN}, {"app": "stranger"}),
    "other": End("other", {"kubernetes.io/metadata.name": "other"}, {"app": "web"}),
    "impostor": End("other", {"kubernetes.io/metadata.name": "other"}, {COMPONENT: "router"}),
    "client": End("web", {"kubernetes.io/metadata.name": "web", "disagg/clients": "allowed"}, {"app": "web"}),
    "monitoring": End("monitoring", {"kubernetes.io/metadata.name": "monitoring"}, {"app": "prometheus"}),
    "names": End("kube-system", {"kubernetes.io/metadata.name": "kube-system"}, {"k8s-app": "kube-dns"}),
    "internet": End(address="203.0.113.7"),
}
"""Ends that are none of the release's pods. `impostor` has a router's label in a namespace of its own."""
REACHES: dict[tuple[str, int | str], frozenset[str]] = {
    ("head", "gcs-server"): NODES,
    ("head", "dashboard"): NODES | {"launch"},
    ("head", "metrics"): NODES | {"monitoring"},
    ("head", "directory"): NODES | {"router"},
    ("head", 10001): NODES,
    ("head", RAYLET): NODES,
    ("head", WORKER): NODES,
    ("head", AGENT): NODES,
    ("head", CONTROL): NODES,
    ("node", "metrics"): NODES | {"monitoring"},
    ("node", RAYLET): NODES,
    ("node", WORKER): NODES,
    ("node", AGENT): NODES,
    ("node", 32768): NODES | {"router"},
    ("node", CONTROL): NODES | {"router"},
    ("node", 60999): NODES | {"router"},
    ("router", "http"): frozenset({"client", "monitoring"}),
    ("router", "control"): NODES,
    ("router", CONTROL): frozenset(),
    ("launch", 8265): frozenset(),
    ("launch", CONTROL): frozenset(),
    ("names", 53): NODES | {"router", "launch", "stranger"},
    ("names", 443): frozenset(),
    ("client", 443): frozenset(),
    ("internet", 443): frozenset(),
}
"""The whole matrix: for each port, which of the release's pods and of `ENDS` reach it; all others do not."""
COVERED: dict[tuple[str, str], set[str]] = {
    ("head", "gcs-server"): {"nodes"},
    ("head", "dashboard"): {"nodes", "jobs"},
    ("head", "metrics"): {"nodes", "metrics-of-nodes"},
    ("head", "directory"): {"nodes", "directory"},
    ("node", "metrics"): {"nodes", "metrics-of-nodes"},
    ("router", "http"): {"clients", "metrics-of-routers"},
    ("router", "control"): {"routers"},
}
"""The policies that admit anybody to each port of a container."""
RAY_PORTS = {
    "node-manager-port": RAYLET,
    "object-manager-port": 6381,
    "dashboard-agent-grpc-port": 6382,
    "runtime-env-agent-port": 6383,
    "min-worker-port": WORKER,
    "max-worker-port": 19999,
}
"""`ray start` chooses random ports for these unless they are given, which routers could reach."""


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
    for one in policies:
        if not one["metadata"].get("annotations", {}).get("disagg/why"):
            yield f"network: policy {one['metadata']['name']} does not say why"
    for pod in rendered.pods():
        own = [one for one in policies if matches(one["spec"]["podSelector"], pod.labels)]
        if not any(one["spec"]["podSelector"] for one in own):
            yield f"network: no policy of its own for {pod.name}"
    yield from _check_matrix(rendered)
    yield from _check_covered(rendered)
    yield from _check_ray_ports(rendered)


def _check_matrix(rendered: Rendered) -> Iterator[str]:
    """What is allowed passes both directions; what is not is refused by each that the release's policies decide."""
    ends, policies = ends_of(rendered), rendered.of("NetworkPolicy")
    for (target, port), expected in REACHES.items():
        for source, other in ((source, other) for source in ends for other in ends[target]):
            number = other.ports.get(port) if isinstance(port, str) else port
            if number is None:
                yield f"network: {target} has no port {port}"
                continue
            for one in ends[source]:
                ways = [way for way, end in ((leaving, one), (entering, other)) if end.namespace == OWN]
                passes = [way(policies, one, other, number) is not None for way in ways]
                if source in expected and not all(passes):
                    yield f"network: {source} may not reach {target} at {port}"
                if source not in expected and any(passes):
                    yield f"network: {source} may reach {target} at {port}"


def ends_of(rendered: Rendered) -> dict[str, list[End]]:
    """All ends by name: the release's pods of each component, and `ENDS`."""
    namespace = rendered.one("Namespace", OWN)["metadata"]
    labels = {"kubernetes.io/metadata.name": OWN, **namespace.get("labels", {})}
    found: dict[str, list[End]] = {name: [end] for name, end in ENDS.items()}
    for pod in rendered.pods():
        ports = {one["name"]: one["containerPort"] for one in pod.main.get("ports", ())}
        found.setdefault(pod.component, []).append(End(OWN, labels, pod.labels, ports=ports))
    return found


def _check_covered(rendered: Rendered) -> Iterator[str]:
    """Each port of each container is opened by exactly the policies that are meant for it."""
    ends, policies = ends_of(rendered), rendered.of("NetworkPolicy")
    for pod in rendered.pods():
        for target in (one for one in ends[pod.component] if one.labels == pod.labels):
            for name, number in target.ports.items():
                admitting = (
                    entering(policies, source, target, number) or ()
                    for some in ends.values()
                    for source in some
                )
                found = {policy for names in admitting for policy in names}
                if found != COVERED.get((pod.component, name)):
                    yield f"network: {pod.name}'s port {name} is opened by {sorted(found)}"


def _check_ray_ports(rendered: Rendered) -> Iterator[str]:
    for pod in (one for one in rendered.pods() if one.component in NODES):
        for name, port in RAY_PORTS.items():
            if pod.ray_start.get(name) != str(port):
                yield f"network: {pod.name} leaves Ray's {name} to chance"
