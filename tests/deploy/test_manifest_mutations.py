"""Each check of the manifests complains when what it looks at is changed: one field, one complaint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from manifest_checks import CHECKS
from manifest_model import KUBECTL, Object, Rendered
from manifest_product import load

from disagg.core.errors import ConfigError

pytestmark = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl, which renders the overlays, is not installed"
)

Renderer = Callable[[str], Rendered]
Change = Callable[[Rendered], Any]


def router(rendered: Rendered) -> Object:
    return rendered.one("Deployment", "disagg-router")["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def main(rendered: Rendered) -> Object:
    return router(rendered)["containers"][0]  # type: ignore[no-any-return]


def cluster(rendered: Rendered) -> Object:
    return rendered.one("RayCluster", "disagg")["spec"]  # type: ignore[no-any-return]


def group(rendered: Rendered, number: int = 0) -> Object:
    return cluster(rendered)["workerGroupSpecs"][number]  # type: ignore[no-any-return]


def node(rendered: Rendered) -> Object:
    return group(rendered)["template"]["spec"]  # type: ignore[no-any-return]


def policy(rendered: Rendered, name: str) -> Object:
    return rendered.one("NetworkPolicy", name)["spec"]  # type: ignore[no-any-return]


def setting(rendered: Rendered, old: str, new: str) -> None:
    [one] = [one for one in rendered.of("ConfigMap") if "disagg.toml" in one["data"]]
    assert old in one["data"]["disagg.toml"]
    one["data"]["disagg.toml"] = one["data"]["disagg.toml"].replace(old, new)


def remove(rendered: Rendered, kind: str, name: str) -> None:
    rendered.objects.remove(rendered.one(kind, name))


CHANGES: dict[str, tuple[Change, str]] = {
    "less is requested than allowed": (
        lambda r: main(r)["resources"]["requests"].update(cpu="1"),
        "router: requests differ",
    ),
    "no memory limit": (lambda r: main(r)["resources"]["limits"].pop("memory"), "no limit for cpu or memory"),
    "latest": (lambda r: main(r).update(image="disagg:latest"), "is not pinned"),
    "no tag": (lambda r: main(r).update(image="disagg"), "is not pinned"),
    "two builds": (lambda r: main(r).update(image="disagg:0.1.0-cpu"), "different builds"),
    "unbounded /dev/shm": (lambda r: node(r)["volumes"][4]["emptyDir"].pop("sizeLimit"), "no sizeLimit"),
    "huge /dev/shm": (lambda r: node(r)["volumes"][4]["emptyDir"].update(sizeLimit="60Gi"), "more than half"),
    "/dev/shm on disk": (lambda r: node(r)["volumes"][4]["emptyDir"].pop("medium"), "not a volume in memory"),
    "tiny /dev/shm": (
        lambda r: node(r)["volumes"][4]["emptyDir"].update(sizeLimit="64Mi"),
        "store is larger",
    ),
    "root": (lambda r: router(r)["securityContext"].update(runAsNonRoot=False), "runs as root"),
    "root by number": (lambda r: node(r)["securityContext"].update(runAsUser=0), "runs as root"),
    "hostIPC": (lambda r: node(r).update(hostIPC=True), "hostIPC"),
    "no seccomp": (lambda r: router(r)["securityContext"].pop("seccompProfile"), "no seccomp"),
    "service account": (lambda r: router(r).pop("automountServiceAccountToken"), "service account"),
    "writable root": (
        lambda r: main(r)["securityContext"].pop("readOnlyRootFilesystem"),
        "write to its root",
    ),
    "privileges": (
        lambda r: main(r)["securityContext"].update(allowPrivilegeEscalation=True),
        "may gain privileges",
    ),
    "capabilities": (
        lambda r: main(r)["securityContext"]["capabilities"].update(drop=[]),
        "keeps capabilities",
    ),
    "more capabilities": (
        lambda r: main(r)["securityContext"]["capabilities"].update(add=["SYS_ADMIN"]),
        "adds capabilities",
    ),
    "a lax namespace": (
        lambda r: r.one("Namespace", "disagg")["metadata"]["labels"].update(
            {"pod-security.kubernetes.io/enforce": "privileged"}
        ),
        "does not fit its pods",
    ),
    "a mount without a volume": (lambda r: router(r)["volumes"].pop(), "are mounted as"),
    "a home that cannot be written": (
        lambda r: main(r)["volumeMounts"][-1].update(readOnly=True),
        "/home/disagg cannot be written",
    ),
    "no HOME": (lambda r: main(r)["env"].pop(0), "HOME is not set"),
    "no liveness": (lambda r: main(r).pop("livenessProbe"), "livenessProbe asks nothing"),
    "wrong path": (lambda r: main(r)["readinessProbe"]["httpGet"].update(path="/healthz"), "asks"),
    "wrong Ray port": (
        lambda r: node(r)["containers"][0]["startupProbe"]["httpGet"].update(port=8265),
        "startupProbe asks",
    ),
    "scraped elsewhere": (
        lambda r: r.one("Deployment", "disagg-router")["spec"]["template"]["metadata"]["annotations"].update(
            {"prometheus.io/port": "9000"}
        ),
        "scraped at a port",
    ),
    "a Service without pods": (
        lambda r: r.one("Service", "disagg-router")["spec"]["selector"].update(
            {"app.kubernetes.io/component": "x"}
        ),
        "selects no pod",
    ),
    "a Service's port": (
        lambda r: r.one("Service", "disagg-router")["spec"]["ports"][0].update(targetPort="web"),
        "has no port web",
    ),
    "a budget without pods": (
        lambda r: r.one("PodDisruptionBudget", "disagg-decode")["spec"]["selector"]["matchLabels"].update(
            {"ray.io/group": "x"}
        ),
        "matches no pod",
    ),
    "a Deployment that does not select its pods": (
        lambda r: r.one("Deployment", "disagg-launch")["spec"]["selector"].update(matchLabels={"a": "b"}),
        "does not select its own",
    ),
    "an autoscaler of nothing": (
        lambda r: r.one("HorizontalPodAutoscaler", "disagg-router")["spec"]["scaleTargetRef"].update(
            name="x"
        ),
        "there is no Deployment x",
    ),
    "no default": (lambda r: remove(r, "NetworkPolicy", "deny-all"), "nothing denies"),
    "egress is open": (lambda r: policy(r, "deny-all").update(policyTypes=["Ingress"]), "nothing denies"),
    "head for all": (lambda r: policy(r, "directory")["ingress"].append({}), "stranger may reach head"),
    "ranks for all": (
        lambda r: policy(r, "ranks")["ingress"][0].pop("from"),
        "stranger may reach node",
    ),
    "ranks for all of the namespace": (
        lambda r: policy(r, "ranks")["ingress"][0]["from"][0].update(podSelector={}),
        "stranger may reach node",
    ),
    "ranks for routers of any namespace": (
        lambda r: policy(r, "ranks")["ingress"][0]["from"][0].update(namespaceSelector={}),
        "impostor may reach node",
    ),
    "ranks for an address": (
        lambda r: policy(r, "ranks")["ingress"][0]["from"].append({"ipBlock": {"cidr": "203.0.113.0/24"}}),
        "internet may reach node",
    ),
    "nodes for the namespace": (
        lambda r: policy(r, "nodes")["ingress"][0]["from"][0].update(podSelector={}),
        "stranger may reach head at gcs-server",
    ),
    "jobs for routers": (
        lambda r: policy(r, "directory")["ingress"][0].pop("ports"),
        "router may reach head at 10001",
    ),
    "no way to the directory": (
        lambda r: policy(r, "directory")["ingress"].pop(0),
        "router may not reach head at directory",
    ),
    "routers may not call": (
        lambda r: policy(r, "routers")["egress"].pop(1),
        "router may not reach node",
    ),
    "routers reach Ray's agent": (
        lambda r: [
            policy(r, "ranks")["ingress"][0].update(ports=[{"port": 32768, "endPort": 60999}]),
            policy(r, "routers")["egress"][1].update(ports=[{"port": 32768, "endPort": 60999}]),
        ],
        "router may reach node at 52365",
    ),
    "Ray's ports anywhere": (
        lambda r: group(r)["rayStartParams"].pop("node-manager-port"),
        "leaves Ray's node-manager-port to chance",
    ),
    "nodes apart": (lambda r: policy(r, "nodes")["ingress"].pop(0), "node may not reach node"),
    "clients of every namespace": (
        lambda r: policy(r, "clients")["ingress"][0]["from"][0].update(namespaceSelector={}),
        "other may reach router at http",
    ),
    "the API for everybody": (
        lambda r: policy(r, "clients")["ingress"][0].pop("from"),
        "internet may reach router at http",
    ),
    "the API for nobody": (
        lambda r: remove(r, "NetworkPolicy", "clients"),
        "client may not reach router at http",
    ),
    "the control port for clients": (
        lambda r: policy(r, "clients")["ingress"][0].pop("ports"),
        "client may reach router at control",
    ),
    "metrics for every namespace": (
        lambda r: policy(r, "metrics-of-nodes")["ingress"][0]["from"][0].update(namespaceSelector={}),
        "other may reach node at metrics",
    ),
    "a second way to a port": (
        lambda r: policy(r, "jobs")["ingress"][0]["from"][0]["podSelector"].update(
            matchLabels={"app.kubernetes.io/component": "node"}
        ),
        "launch may not reach head at dashboard",
    ),
    "a port that is open twice": (
        lambda r: policy(r, "directory")["ingress"][0]["ports"].append({"port": 6379, "protocol": "TCP"}),
        "disagg-headgroup's port gcs-server is opened by ['directory', 'nodes']",
    ),
    "a way out": (
        lambda r: policy(r, "names")["egress"].append({"to": [{"ipBlock": {"cidr": "0.0.0.0/0"}}]}),
        "router may reach internet at 443",
    ),
    "no names": (lambda r: remove(r, "NetworkPolicy", "names"), "node may not reach names at 53"),
    "a policy without a reason": (
        lambda r: r.one("NetworkPolicy", "ranks")["metadata"].pop("annotations"),
        "ranks does not say why",
    ),
    "a pod without a policy": (
        lambda r: remove(r, "NetworkPolicy", "launch"),
        "no policy of its own for disagg-launch",
    ),
    "more ranks than GPUs": (lambda r: setting(r, "tp = 2", "tp = 4"), "sizes: pods and places"),
    "fewer GPUs than ranks": (
        lambda r: node(r)["containers"][0]["resources"]["limits"].update({"nvidia.com/gpu": "1"}),
        "sizes: pods and places",
    ),
    "prefill fits on the other pod": (lambda r: setting(r, "tp = 1", "tp = 3"), "may be placed on its pod"),
    "ranks on the head": (
        lambda r: cluster(r)["headGroupSpec"]["rayStartParams"].pop("num-cpus"),
        "a rank on the head",
    ),
    "a pod without a group": (
        lambda r: group(r).update(replicas=2, minReplicas=2, maxReplicas=2),
        "sizes: pods and places",
    ),
    "a group without a pod": (lambda r: setting(r, "tp = 1", "tp = 1\ngroups = 2"), "sizes: pods and places"),
    "pods that come and go": (lambda r: group(r).update(minReplicas=0), "may change"),
    "wrong device": (lambda r: setting(r, 'device = "cuda"', 'device = "cpu"'), "device is not cuda"),
    "another directory": (lambda r: setting(r, "5570", "5600"), "ports: routers join"),
    "another router port": (lambda r: setting(r, "5571", "5600"), "has control at"),
    "another HTTP port": (lambda r: main(r)["args"].__setitem__(3, "--port=80"), "has http at"),
    "another Service to join": (
        lambda r: main(r)["args"].__setitem__(0, "--join=tcp://elsewhere:5570"),
        "routers join elsewhere",
    ),
    "jobs to nobody": (
        lambda r: remove(r, "Service", "disagg-dashboard"),
        "jobs are submitted to",
    ),
    "no configuration": (
        lambda r: main(r)["args"].__setitem__(1, "--config=/etc/other/disagg.toml"),
        "nothing mounted at /etc/other",
    ),
    "no API keys": (
        lambda r: main(r)["args"].__setitem__(4, "--api-key-file=/keys/api-keys"),
        "nothing mounted at /keys",
    ),
    "readable keys": (
        lambda r: router(r)["volumes"][2]["secret"].update(defaultMode=0o444),
        "lets others read /secrets/control/control.json",
    ),
    "keys that do not follow": (
        lambda r: main(r)["volumeMounts"][3].update(subPath="control.json"),
        "does not follow the Secret",
    ),
    "no address of its own": (
        lambda r: setting(r, 'host = "auto"', 'host = "127.0.0.1"'),
        "control.host is not auto",
    ),
    "no authentication": (lambda r: cluster(r)["authOptions"].update(mode="disabled"), "is not token"),
    "a node without the token": (
        lambda r: node(r)["containers"][0]["env"].pop(0),
        "does not use Ray's token",
    ),
    "an unknown Secret": (
        lambda r: router(r)["volumes"][3]["secret"].update(secretName="other"),
        "how to make the Secret other",
    ),
    "another key of a Secret": (
        lambda r: setting(r, "/secrets/control/control.json", "/secrets/control/keys.json"),
        "does not use key control.json",
    ),
    "another key of the token": (
        lambda r: node(r)["containers"][0]["env"][1]["valueFrom"]["secretKeyRef"].update(key="token"),
        "does not use key auth_token",
    ),
    "an unknown ConfigMap": (
        lambda r: router(r)["volumes"][1]["configMap"].update(name="disagg-configuration"),
        "a ConfigMap that is not there",
    ),
    "an unknown claim": (
        lambda r: router(r)["volumes"][0]["persistentVolumeClaim"].update(claimName="other"),
        "how to make the claim other",
    ),
    "a committed Secret": (
        lambda r: r.objects.append({"kind": "Secret", "metadata": {"name": "x"}}),
        "a Secret is among",
    ),
    "killed in the drain": (
        lambda r: router(r).update(terminationGracePeriodSeconds=30),
        "disagg-router is killed",
    ),
    "a drain shorter than an answer": (
        lambda r: setting(r, "drain_timeout_s = 300.0", "drain_timeout_s = 299.0"),
        "aborts answers",
    ),
    "nodes killed in the drain": (lambda r: setting(r, "s = 10.0", "s = 60.0"), "is killed before"),
    "nodes go first": (
        lambda r: node(r)["containers"][0].pop("lifecycle"),
        "stops before routers",
    ),
    "an evictable group": (
        lambda r: remove(r, "PodDisruptionBudget", "disagg-prefill"),
        "disagg-prefill has 0 budgets",
    ),
    "a weak budget": (
        lambda r: r.one("PodDisruptionBudget", "disagg-head")["spec"].update(minAvailable=0),
        "budget keeps 0 of 1",
    ),
    "a budget that blocks": (
        lambda r: r.one("PodDisruptionBudget", "disagg-router")["spec"].update(minAvailable=2),
        "blocks every eviction",
    ),
    "another Ray": (lambda r: cluster(r).update(rayVersion="2.59.0"), "versions: rayVersion"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_detected(rendered: Renderer, name: str) -> None:
    change, complaint = CHANGES[name]
    changed = rendered("base")
    change(changed)
    found = [problem for check in CHECKS for problem in check(changed)]
    assert any(complaint in problem for problem in found), found


def test_root_needs_an_hca(rendered: Renderer) -> None:
    changed = rendered("overlays/rdma")
    for which in ("requests", "limits"):
        del node(changed)["containers"][0]["resources"][which]["rdma/hca"]
    found = [problem for check in CHECKS for problem in check(changed)]
    assert found == [
        "disagg-prefill: runs as root",
        "disagg-prefill/ray-worker: adds capabilities ['IPC_LOCK']",
    ]


def test_the_cpu_overlay_counts_cpus(rendered: Renderer) -> None:
    changed = rendered("overlays/cpu")
    group(changed, 1)["rayStartParams"]["num-cpus"] = "2"
    assert any("sizes: pods and places" in one for check in CHECKS for one in check(changed))


def test_a_key_that_the_product_does_not_know(rendered: Renderer, tmp_path: Path) -> None:
    changed = rendered("base")
    setting(changed, "pool_tokens", "pool_token")
    with pytest.raises(ConfigError, match="unknown key pool_token"):
        load(changed, tmp_path)
