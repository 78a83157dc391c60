"""The Helm chart that deploy/helm/make_chart.py writes renders what the overlays render."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from helm_text import render_chart
from manifest_model import KUBECTL

from deploy.helm.make_chart import LOADER, OVERLAYS, write_chart
from deploy.helm.make_chart import rendered as overlay_objects

pytestmark = pytest.mark.skipif(
    KUBECTL is None, reason="kubectl, which renders the overlays, is not installed"
)
HELM = shutil.which("helm")
every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@pytest.fixture(scope="module")
def chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("helm") / "chart"
    write_chart(folder, "0.1.0")
    return folder


def values_of(chart: Path, overlay: str, **more: Any) -> dict[str, Any]:
    return {**yaml.safe_load((chart / f"values-{overlay}.yaml").read_text()), **more}


def rendered(chart: Path, values: dict[str, Any], namespace: str = "disagg") -> list[dict[str, Any]]:
    templates = [chart / "templates" / f"{overlay}.yaml" for overlay in OVERLAYS]
    return [one for file in templates for one in render_chart(file.read_text(), values, namespace)]


def by_name(objects: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in objects}


@every_overlay
def test_the_chart_equals_the_overlay(chart: Path, overlay: str) -> None:
    found = rendered(chart, values_of(chart, overlay, createNamespace=True))
    assert by_name(found) == by_name(overlay_objects(overlay))


@pytest.mark.skipif(HELM is None, reason="helm is not installed")
@every_overlay
def test_helm_renders_the_same(chart: Path, overlay: str) -> None:
    flags = [
        "--namespace",
        "disagg",
        "--kube-version",
        "1.33.0",
        "--values",
        chart / f"values-{overlay}.yaml",
    ]
    done = subprocess.run(
        [str(HELM), "template", "x", chart, *flags], capture_output=True, text=True, check=True, timeout=60
    )
    found = [one for one in yaml.load_all(done.stdout, LOADER) if one]
    assert by_name(found) == by_name(rendered(chart, values_of(chart, overlay)))


def test_values_reach_every_pod(chart: Path) -> None:
    sizes = {"resources": {"limits": {"cpu": "7"}}, "replicas": 3, "minReplicas": 3, "maxReplicas": 3}
    values = values_of(
        chart,
        "cpu",
        image="registry/disagg:9",
        models={"hostPath": {"path": "/m"}},
        config='[model]\npath = "/models/{{x}}"\n',
    )
    values["nodes"]["prefill"] = {**sizes, "sizeLimit": "5Gi"}
    text = json.dumps(rendered(chart, values, "other"))
    assert '"disagg:0.1.0' not in text
    assert text.count('"image": "registry/disagg:9"') > 4
    assert text.count('{"name": "models", "hostPath": {"path": "/m"}}') == 4
    assert '"namespace": "disagg"' not in text
    assert '"kind": "Namespace"' not in text
    assert '"name": "disagg-config"' in text
    assert '"cpu": "7"' in text
    assert '"replicas": 3' in text
    assert '"sizeLimit": "5Gi"' in text
    assert "/models/{{x}}" in text
