"""Writes a Helm chart that renders what the overlays of deploy/k8s render. Needs kubectl.

    python deploy/helm/make_chart.py chart
    helm install disagg chart --namespace disagg --values chart/values-nvlink.yaml --set image=REGISTRY/disagg:0.1.0

The chart is made from the overlays, so the two cannot differ. Its values replace what an installation changes most:
image, configuration, models, sizes of pods, number of routers.
"""

from __future__ import annotations

import argparse
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from disagg import __version__

DEPLOY = Path(__file__).resolve().parents[1]
OVERLAYS = ("cpu", "nvlink", "rdma")
CHART = """\
apiVersion: v2
name: disagg
description: Disaggregated LLM serving on Kubernetes, with KubeRay
type: application
version: {version}
appVersion: "{version}"
kubeVersion: ">=1.30.0-0"
"""
VALUES = """\
# Overlay of deploy/k8s: cpu (a trial without GPUs), nvlink (one machine), rdma (several machines).
# `image`, `config` (disagg.toml), `models` (source of the volume), `nodes` (sizes of pods; `prefill.tp` and
# `decode.tp` of `config` must fit them), `router`. The namespace needs the label of `podSecurity`, which
# `createNamespace` sets.
"""
CHECK = """\
{{ if not .Values.overlay }}
{{ fail "choose an overlay: --values values-cpu.yaml, values-nvlink.yaml or values-rdma.yaml of the chart" }}
{{ end }}
"""
_HOLE = re.compile(r"'?<<(.*?)>>'?")
_BRACES = "\0"
"""Stands for braces of the objects themselves."""

LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""The dashboard's text takes seconds without C."""

Object = dict[str, Any]


class _ValuesDumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


_ValuesDumper.add_representer(
    str,
    lambda dumper, text: dumper.represent_scalar(
        "tag:yaml.org,2002:str", text, style="|" if "\n" in text else None
    ),
)


def rendered(overlay: str) -> list[Object]:
    """Returns the objects of an overlay. Raises `CalledProcessError`."""
    command = ["kubectl", "kustomize", str(DEPLOY / "k8s" / "overlays" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [one for one in yaml.load_all(done.stdout, LOADER) if one]


def hole(value: str) -> str:
    """Returns a scalar that `template` replaces by an expression of Helm."""
    return f"<<{value}>>"


def extract(objects: list[Object], overlay: str) -> Object:
    """Returns the values of an overlay, and puts holes in their places in `objects`."""
    values: Object = {"overlay": overlay, "image": "", "createNamespace": False, "podSecurity": ""}
    values |= {"models": {}, "router": {}, "nodes": {}, "config": ""}
    for one in objects:
        meta, spec = one["metadata"], one.get("spec", {})
        if "namespace" in meta:
            meta["namespace"] = hole(".Release.Namespace")
        match one["kind"]:
            case "Namespace":
                values["podSecurity"] = meta["labels"]["pod-security.kubernetes.io/enforce"]
                meta["labels"]["pod-security.kubernetes.io/enforce"] = hole(".Values.podSecurity | toJson")
                meta["name"] = hole(".Release.Namespace")
            case "ConfigMap" if meta["name"] == "disagg-config":
                values["config"] = one["data"]["disagg.toml"]
                one["data"]["disagg.toml"] = hole(".Values.config | toJson")
            case "HorizontalPodAutoscaler":
                values["router"].update(_taken(spec, "router", "minReplicas", "maxReplicas"))
            case "Deployment" if meta["name"] == "disagg-router":
                [main] = spec["template"]["spec"]["containers"]
                values["router"].update(_taken(main, "router", "resources"))
            case "RayCluster":
                _nodes(spec, values["nodes"])
    _everywhere(objects, values)
    return values


def _nodes(cluster: Object, nodes: Object) -> None:
    groups = {"head": cluster["headGroupSpec"]}
    groups |= {group["groupName"]: group for group in cluster["workerGroupSpecs"]}
    for name, group in groups.items():
        spec = group["template"]["spec"]
        nodes[name] = _taken(spec["containers"][0], f"nodes.{name}", "resources")
        if name != "head":
            nodes[name] |= _taken(group, f"nodes.{name}", "replicas", "minReplicas", "maxReplicas")
            [shared] = [one for one in spec["volumes"] if one["name"] == "shm"]
            nodes[name] |= _taken(shared["emptyDir"], f"nodes.{name}", "sizeLimit")


def _taken(where: Object, path: str, *keys: str) -> Object:
    """Moves values of `where` to the result; leaves holes for `.Values.PATH.KEY`."""
    found = {key: where[key] for key in keys}
    where.update({key: hole(f".Values.{path}.{key} | toJson") for key in keys})
    return found


def _everywhere(objects: list[Object], values: Object) -> None:
    """Moves the image and the volume of models, which several pods have."""
    for one in _dicts(objects):
        if str(one.get("image", "")).startswith("disagg:"):
            values["image"] = one["image"]
            one["image"] = hole(".Values.image | toJson")
        for at, volume in enumerate(one.get("volumes") or ()):
            if volume["name"] == "models":
                values["models"] = {key: value for key, value in volume.items() if key != "name"}
                one["volumes"][at] = hole('merge (dict "name" "models") .Values.models | toJson')


def _dicts(value: Any) -> Iterator[Object]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _dicts(one)


def template(objects: list[Object], overlay: str) -> str:
    """Returns the template of an overlay, of objects with holes. Text that looks like a template is escaped."""
    parts = []
    for one in objects:
        text = yaml.dump(one, Dumper=DUMPER, sort_keys=False, width=1 << 20).replace("{{", _BRACES)
        text = _HOLE.sub(lambda found: "{{ " + found[1] + " }}", text).replace(_BRACES, '{{ "{{" }}')
        if one["kind"] == "Namespace":
            text = "{{ if .Values.createNamespace }}\n" + text + "{{ end }}\n"
        parts.append(text)
    body = "---\n".join(parts)
    return f'{{{{ if eq .Values.overlay "{overlay}" }}}}\n{body}{{{{ end }}}}\n'


def write_chart(out: Path, version: str) -> None:
    """Writes the chart to the folder `out`, which must not exist."""
    (out / "templates").mkdir(parents=True)
    (out / "Chart.yaml").write_text(CHART.format(version=version))
    (out / "values.yaml").write_text('overlay: ""\n')  # values of two overlays would be merged
    (out / "templates" / "check.yaml").write_text(CHECK)
    for overlay in OVERLAYS:
        objects = rendered(overlay)
        values = VALUES + yaml.dump(extract(objects, overlay), Dumper=_ValuesDumper, sort_keys=False)
        (out / f"values-{overlay}.yaml").write_text(values)
        (out / "templates" / f"{overlay}.yaml").write_text(template(objects, overlay))


def main() -> None:
    """Writes the chart."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path, help="a folder that does not exist")
    write_chart(parser.parse_args().out, __version__)


if __name__ == "__main__":
    main()
