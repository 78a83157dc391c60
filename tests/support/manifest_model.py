"""What `kubectl kustomize` renders, as pods that the checks of deploy/k8s look at."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
_RAY = importlib.util.find_spec("ray")
assert _RAY is not None, "Ray is installed"
RAY = Path(str(_RAY.origin)).parent
"""Its files are read; it is not imported, for it takes its settings from the environment when it is."""
K8S = ROOT / "deploy" / "k8s"
OVERLAYS = ("base", "overlays/cpu", "overlays/nvlink", "overlays/rdma")
KUBECTL = shutil.which("kubectl")
COMPONENT = "app.kubernetes.io/component"

Object = dict[str, Any]


@dataclass(frozen=True)
class Pod:
    """A kind of pod: a Deployment's, or a part of a RayCluster's."""

    name: str
    labels: Mapping[str, str]
    """With those that KubeRay adds."""
    spec: Object
    replicas: int | None = None
    """None where an autoscaler decides."""
    ray_start: Mapping[str, str] = field(default_factory=dict)

    @property
    def component(self) -> str:
        """Its part in the deployment: head, node, router or launch."""
        return self.labels.get(COMPONENT, "")

    @property
    def main(self) -> Object:
        """The one container that is no init container."""
        return self.spec["containers"][0]  # type: ignore[no-any-return]

    def containers(self) -> list[Object]:
        """All of them, init containers too."""
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    def memory_volumes(self) -> dict[str, Object]:
        """`emptyDir`s in memory, by name."""
        volumes = {one["name"]: one["emptyDir"] for one in self.spec["volumes"] if "emptyDir" in one}
        return {name: one for name, one in volumes.items() if one.get("medium") == "Memory"}


@dataclass(frozen=True)
class Rendered:
    """Everything that one overlay applies."""

    objects: list[Object]

    def of(self, kind: str) -> list[Object]:
        """The objects of a kind."""
        return [one for one in self.objects if one["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        """An object by name; `KeyError` without it."""
        for found in self.of(kind):
            if found["metadata"]["name"] == name:
                return found
        raise KeyError(f"{kind} {name}")

    @property
    def toml(self) -> str:
        """The configuration file that the pods mount."""
        [text] = [one["data"]["disagg.toml"] for one in self.of("ConfigMap") if "disagg.toml" in one["data"]]
        return str(text)

    @property
    def settings(self) -> dict[str, Any]:
        """The same, parsed and not checked."""
        return tomllib.loads(self.toml)

    def pods(self) -> list[Pod]:
        """Every kind of pod that will run."""
        return [*self._deployed(), *(pod for one in self.of("RayCluster") for pod in _ray_pods(one))]

    def component(self, name: str) -> list[Pod]:
        """The pods of one component."""
        return [pod for pod in self.pods() if pod.component == name]

    def _deployed(self) -> Iterator[Pod]:
        for one in self.of("Deployment"):
            template = one["spec"]["template"]
            yield Pod(
                one["metadata"]["name"],
                template["metadata"]["labels"],
                template["spec"],
                one["spec"].get("replicas"),
            )


def render(overlay: str) -> Rendered:
    """What `kubectl apply -k` of a folder under deploy/k8s would send. Raises `CalledProcessError`."""
    assert KUBECTL is not None, "who renders looks for kubectl first"
    done = subprocess.run(
        [KUBECTL, "kustomize", str(K8S / overlay)], capture_output=True, text=True, check=True, timeout=60
    )
    return Rendered([one for one in yaml.safe_load_all(done.stdout) if one])


def quantity(text: str | int) -> Decimal:
    """Kubernetes' quantities as numbers: '500m', '8Gi', 2."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(m|[KMGT]i)?", str(text))
    assert match is not None, f"a quantity that is not used here: {text!r}"
    scale = {"": Decimal(1), "m": Decimal("0.001")}
    scale |= {f"{letter}i": Decimal(1024**power) for power, letter in enumerate("KMGT", 1)}
    return Decimal(match[1]) * scale[match[2] or ""]


def matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """A label selector (`matchLabels` and `matchExpressions` with In); an empty one selects all."""
    if any(labels.get(key) != value for key, value in selector.get("matchLabels", {}).items()):
        return False
    expressions = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in expressions), "only In is used here"
    return all(labels.get(one["key"]) in one["values"] for one in expressions)


def _ray_pods(cluster: Object) -> Iterator[Pod]:
    name, head = cluster["metadata"]["name"], cluster["spec"]["headGroupSpec"]
    yield _ray_pod(name, "head", "headgroup", head, 1)
    for group in cluster["spec"]["workerGroupSpecs"]:
        yield _ray_pod(name, "worker", group["groupName"], group, group["replicas"])


def _ray_pod(cluster: str, node_type: str, group: str, spec: Object, replicas: int) -> Pod:
    template = spec["template"]
    added = {"ray.io/cluster": cluster, "ray.io/node-type": node_type, "ray.io/group": group}
    labels = {**template["metadata"]["labels"], **added}
    return Pod(f"{cluster}-{group}", labels, template["spec"], replicas, spec["rayStartParams"])
