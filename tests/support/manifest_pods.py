"""Checks of each pod by itself: resources, images, security, volumes, probes. Each returns what is wrong."""

from __future__ import annotations

from collections.abc import Iterator

from manifest_model import Object, Pod, Rendered, quantity

from disagg import __version__

RAY_HEALTH = ("/api/healthz", 52365)
"""Ray's dashboard agent; `tests/deploy/test_manifests.py` looks it up in Ray itself."""
ROUTER_HEALTH = {"startupProbe": "/health", "readinessProbe": "/ready", "livenessProbe": "/health"}


def check_resources(rendered: Rendered) -> Iterator[str]:
    """Requests equal limits, so that a pod is of class Guaranteed and is never the one that is killed first."""
    for pod, container in _containers(rendered):
        resources = container.get("resources", {})
        if not {"cpu", "memory"} <= set(resources.get("limits", {})):
            yield f"{pod.name}/{container['name']}: no limit for cpu or memory"
        if resources.get("limits") != resources.get("requests"):
            yield f"{pod.name}/{container['name']}: requests differ from limits"


def check_images(rendered: Rendered) -> Iterator[str]:
    """Images of this version, all of one build."""
    used = {container["image"] for _, container in _containers(rendered)}
    for image in used:
        tag = image.rpartition(":")[2]
        if tag != __version__ and not tag.startswith(f"{__version__}-"):
            yield f"image {image}: is not pinned to {__version__}"
    if len(used) > 1:
        yield f"images of different builds: {sorted(used)}"


def check_memory(rendered: Rendered) -> Iterator[str]:
    """Volumes in memory are bounded and leave the container half of its memory; Ray's store fits into /dev/shm."""
    for pod in rendered.pods():
        sizes = {name: one.get("sizeLimit") for name, one in pod.memory_volumes().items()}
        for name in (name for name, size in sizes.items() if size is None):
            yield f"{pod.name}: memory volume {name} has no sizeLimit"
        total = sum(quantity(size) for size in sizes.values() if size is not None)
        if total * 2 > quantity(pod.main["resources"]["limits"].get("memory", 0)):
            yield f"{pod.name}: memory volumes take more than half of the memory limit"
        if pod.component in {"head", "node"}:
            yield from _check_shared_memory(pod)


def _check_shared_memory(pod: Pod) -> Iterator[str]:
    mounted = [one["name"] for one in pod.main["volumeMounts"] if one["mountPath"] == "/dev/shm"]
    volume = pod.memory_volumes().get(mounted[0]) if mounted else None
    if volume is None:
        yield f"{pod.name}: /dev/shm is not a volume in memory"
    elif quantity(pod.ray_start["object-store-memory"]) > quantity(volume.get("sizeLimit", 0)):
        yield f"{pod.name}: Ray's object store is larger than /dev/shm"


def check_security(rendered: Rendered) -> Iterator[str]:
    """Pod security standard `restricted`; the one exception is root with IPC_LOCK on nodes that have an HCA."""
    exceptions = False
    for pod in rendered.pods():
        rdma = pod.component == "node" and "rdma/hca" in pod.main["resources"]["limits"]
        exceptions |= rdma
        yield from _check_pod_security(pod, rdma)
        for container in pod.containers():
            yield from _check_container_security(pod, container, rdma)
    level = rendered.one("Namespace", "disagg")["metadata"]["labels"]["pod-security.kubernetes.io/enforce"]
    if level != ("privileged" if exceptions else "restricted"):
        yield f"namespace: pod security standard {level} does not fit its pods"


def _check_pod_security(pod: Pod, rdma: bool) -> Iterator[str]:
    context = pod.spec["securityContext"]
    for name in ("hostIPC", "hostPID", "hostNetwork"):
        if pod.spec.get(name):
            yield f"{pod.name}: {name}"
    if pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.name}: mounts a service account's token"
    if not rdma and not (context.get("runAsNonRoot") is True and context.get("runAsUser") == 10001):
        yield f"{pod.name}: runs as root"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"{pod.name}: has no seccomp profile"


def _check_container_security(pod: Pod, container: Object, rdma: bool) -> Iterator[str]:
    context, name = container.get("securityContext", {}), f"{pod.name}/{container['name']}"
    if context.get("readOnlyRootFilesystem") is not True:
        yield f"{name}: can write to its root"
    if context.get("allowPrivilegeEscalation") is not False:
        yield f"{name}: may gain privileges"
    capabilities = context.get("capabilities", {})
    if capabilities.get("drop") != ["ALL"]:
        yield f"{name}: keeps capabilities"
    if capabilities.get("add", []) != (["IPC_LOCK"] if rdma else []):
        yield f"{name}: adds capabilities {capabilities.get('add')}"


def check_mounts(rendered: Rendered) -> Iterator[str]:
    """Every mount has its volume, every volume is mounted, and HOME and /tmp can be written."""
    for pod in rendered.pods():
        volumes = {one["name"] for one in pod.spec["volumes"]}
        mounted = {one["name"] for each in pod.containers() for one in each["volumeMounts"]}
        if volumes != mounted:
            yield f"{pod.name}: volumes {sorted(volumes)} are mounted as {sorted(mounted)}"
        home = [one["value"] for one in pod.main["env"] if one["name"] == "HOME"]
        writable = {one["mountPath"] for one in pod.main["volumeMounts"] if not one.get("readOnly")}
        for path in (*home, "/tmp"):
            if path not in writable:
                yield f"{pod.name}: {path} cannot be written"
        if not home:
            yield f"{pod.name}: HOME is not set"


def check_probes(rendered: Rendered) -> Iterator[str]:
    """Who listens has three probes, at paths that are there."""
    for pod in rendered.pods():
        if pod.component == "launch":  # listens nowhere
            continue
        for kind, path in ROUTER_HEALTH.items():
            probe = pod.main.get(kind, {}).get("httpGet", {})
            wanted = (path, "http") if pod.component == "router" else RAY_HEALTH
            if (probe.get("path"), probe.get("port")) != wanted:
                yield f"{pod.name}: {kind} asks {probe or 'nothing'}, not {wanted}"


def check_scrapes(rendered: Rendered) -> Iterator[str]:
    """Prometheus scrapes a port that the pod has."""
    for one in (*rendered.of("Deployment"), *_ray_groups(rendered)):
        template = one["spec"]["template"] if "spec" in one else one["template"]
        annotations = template["metadata"].get("annotations", {})
        ports = [port["containerPort"] for port in template["spec"]["containers"][0].get("ports", ())]
        if ports and int(annotations.get("prometheus.io/port", 0)) not in ports:
            yield f"{template['metadata']['labels']}: is scraped at a port that it has not"


def _ray_groups(rendered: Rendered) -> Iterator[Object]:
    for cluster in rendered.of("RayCluster"):
        yield cluster["spec"]["headGroupSpec"]
        yield from cluster["spec"]["workerGroupSpecs"]


def _containers(rendered: Rendered) -> Iterator[tuple[Pod, Object]]:
    for pod in rendered.pods():
        for container in pod.containers():
            yield pod, container
