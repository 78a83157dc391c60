"""deploy/k8s: every overlay renders, fits Kubernetes' and KubeRay's schemas, and fits the product."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path

import kubernetes_validate
import pytest
import typer
from kube_schema import CustomKinds
from manifest_checks import CHECKS
from manifest_model import K8S, KUBECTL, OVERLAYS, RAY, ROOT, Rendered
from manifest_network import ENDS, RAY_PORTS, ends_of
from manifest_pods import RAY_HEALTH, ROUTER_HEALTH
from manifest_product import load
from network_policies import leaving

from disagg.cli.app import app

KUBERNETES = "1.33"
CRDS = os.environ.get("DISAGG_KUBERAY_CRDS")

needs_kubectl = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl, which renders the overlays, is not installed"
)
needs_crds = pytest.mark.skipif(
    CRDS is None, reason="DISAGG_KUBERAY_CRDS names no folder of KubeRay's definitions"
)
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)

Renderer = Callable[[str], Rendered]


@needs_kubectl
@every_overlay
def test_built_in_kinds_fit_their_schemas(rendered: Renderer, overlay: str) -> None:
    for one in rendered(overlay).objects:
        if not one["apiVersion"].startswith("ray.io/"):
            kubernetes_validate.validate(one, KUBERNETES, strict=True)


@needs_kubectl
def test_an_unknown_field_does_not_fit(rendered: Renderer) -> None:
    broken = rendered("base").one("Deployment", "disagg-router")
    broken["spec"]["template"]["spec"]["containers"][0]["port"] = 8000
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(broken, KUBERNETES, strict=True)


@pytest.fixture(scope="module")
def kinds() -> CustomKinds:
    return CustomKinds(Path(CRDS or ""))


@needs_kubectl
@needs_crds
@every_overlay
def test_custom_kinds_fit_their_definitions(rendered: Renderer, kinds: CustomKinds, overlay: str) -> None:
    custom = [one for one in rendered(overlay).objects if kinds.knows(one)]
    assert [one["kind"] for one in custom] == ["RayCluster"]
    assert kinds.problems(custom[0]) == []


@needs_kubectl
@needs_crds
def test_what_does_not_fit_a_definition(rendered: Renderer, kinds: CustomKinds) -> None:
    [cluster] = rendered("base").of("RayCluster")
    cluster["spec"]["authOptions"]["mode"] = "none"
    cluster["spec"]["headGroupSpec"]["template"]["spec"]["containers"][0]["probe"] = {}
    cluster["spec"]["workerGroupSpecs"][0]["replicas"] = "1"
    del cluster["spec"]["workerGroupSpecs"][1]["groupName"]
    found = kinds.problems(cluster)
    assert [problem.split(":")[0] for problem in found] == [
        "$.spec.authOptions.mode",
        "$.spec.headGroupSpec.template.spec.containers[0]",
        "$.spec.workerGroupSpecs[0].replicas",
        "$.spec.workerGroupSpecs[1]",
    ], found


@needs_kubectl
@every_overlay
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: str(check.__name__))
def test_overlay(rendered: Renderer, overlay: str, check: Callable[[Rendered], Iterable[str]]) -> None:
    assert list(check(rendered(overlay))) == []


@needs_kubectl
@every_overlay
def test_the_configuration_loads(rendered: Renderer, overlay: str, tmp_path: Path) -> None:
    config = load(rendered(overlay), tmp_path)
    assert config.api.max_running > 0
    assert config.control.router_port == 5571
    assert bool(config.model.path) != bool(config.model.random_init)


@needs_kubectl
@every_overlay
def test_a_changed_configuration_replaces_no_pod_of_a_group(rendered: Renderer, overlay: str) -> None:
    """The name of a mounted ConfigMap is part of the pods' template, and KubeRay replaces all pods if that changes.
    `disagg roll` replaces the groups one by one."""
    mounted = {
        volume["configMap"]["name"]
        for pod in rendered(overlay).pods()
        for volume in pod.spec["volumes"]
        if "configMap" in volume
    }
    assert mounted == {"disagg-config"}, "the name does not depend on the content"


@needs_kubectl
def test_the_dashboard_is_where_grafanas_sidecar_looks(rendered: Renderer) -> None:
    found = rendered("base").one("ConfigMap", "disagg-grafana")
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert json.loads(found["data"]["disagg.json"])["title"] == "disagg"
    assert len(found["data"]["disagg.json"]) < 1 << 17, (
        "twice, with what kubectl remembers, in one object of 1 MiB"
    )


@needs_kubectl
def test_the_overlays_are_all_there_are() -> None:
    found = sorted(f"{one.parent.relative_to(K8S)}" for one in K8S.rglob("kustomization.yaml"))
    assert found == sorted(OVERLAYS)


@needs_kubectl
@pytest.mark.parametrize("component", ["router", "launch"])
def test_commands_parse(rendered: Renderer, component: str) -> None:
    [pod] = rendered("base").component(component)
    words = [*pod.main["command"], *pod.main["args"]]
    words = words[words.index("disagg") + 1 :]
    # Not `command_line()`: a context without the one of `disagg` changes the command's help flags.
    command = typer.main.get_command(app).commands.get(words[0])  # type: ignore[attr-defined]
    if command is None:
        pytest.skip(f"there is no `disagg {words[0]}` yet")
    known = {option for parameter in command.params for option in parameter.opts}
    if component == "router" and "--join" not in known:
        pytest.skip("`disagg serve` cannot --join yet")
    command.make_context(words[0], words[1:])


def test_health_paths_of_ray() -> None:
    """Read, not imported: Ray's agent answers this path, and without a token."""
    agent = (RAY / "dashboard" / "http_server_agent.py").read_text()
    public = agent.partition("PUBLIC_EXACT_PATHS = [")[2].partition("]")[0]
    assert f'"{RAY_HEALTH[0]}"' in public
    constants = (RAY / "_private" / "ray_constants.py").read_text()
    assert f"DEFAULT_DASHBOARD_AGENT_LISTEN_PORT = {RAY_HEALTH[1]}" in constants


def test_ports_of_ray() -> None:
    """Read, not imported: `ray start` has an option for each port that the manifests fix."""
    options = (RAY / "scripts" / "scripts.py").read_text()
    for name in RAY_PORTS:
        assert f'"--{name}"' in options, name


@needs_kubectl
@every_overlay
def test_every_pod_resolves_names_and_nothing_else_outside(rendered: Renderer, overlay: str) -> None:
    found = rendered(overlay)
    policies, ends = found.of("NetworkPolicy"), ends_of(found)
    for component in ("head", "node", "router", "launch"):
        for one in ends[component]:
            assert leaving(policies, one, ENDS["names"], 53, "UDP") is not None
            for other in ("internet", "monitoring", "client", "other"):
                assert leaving(policies, one, ENDS[other], 53, "UDP") is None


@needs_kubectl
def test_the_documentation_names_every_policy_that_opens_a_port(rendered: Renderer) -> None:
    documented = (ROOT / "deploy" / "README.md").read_text()
    for one in rendered("base").of("NetworkPolicy"):
        if one["spec"].get("ingress"):
            assert f"`{one['metadata']['name']}`" in documented


def test_paths_of_the_router() -> None:
    text = "".join(path.read_text() for path in (ROOT / "disagg" / "api").glob("*.py"))
    for path in {*ROUTER_HEALTH.values(), "/metrics"}:
        assert f'"{path}"' in text, path


@needs_kubectl
def test_the_autoscaler_looks_at_a_metric_that_there_is(rendered: Renderer) -> None:
    [one] = rendered("base").of("HorizontalPodAutoscaler")
    [metric] = one["spec"]["metrics"]
    text = (ROOT / "disagg" / "api" / "metrics.py").read_text()
    assert f'"{metric["pods"]["metric"]["name"]}"' in text
