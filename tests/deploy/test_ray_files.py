"""deploy/ray: the cluster file fits Ray's own schema, requires the token everywhere, and names existing files."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from manifest_model import RAY, ROOT, Rendered
from manifest_product import load

FOLDER = ROOT / "deploy" / "ray"
CLUSTER = yaml.safe_load((FOLDER / "cluster.yaml").read_text())
SCHEMA = json.loads((RAY / "autoscaler" / "ray-schema.json").read_text())
SETTINGS = Rendered([{"kind": "ConfigMap", "data": {"disagg.toml": (FOLDER / "disagg.toml").read_text()}}])


def problems(cluster: dict[str, Any]) -> list[str]:
    """What is wrong with a cluster file, in words."""
    found = [error.message for error in jsonschema.Draft7Validator(SCHEMA).iter_errors(cluster)]
    mounted = cluster["file_mounts"]
    for name in ("head_start_ray_commands", "worker_start_ray_commands"):
        [start] = [line for line in cluster[name] if "ray start" in line]
        token = re.search(r"RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=(\S+)", start)
        if token is None or token[1] not in mounted:
            found.append(f"{name}: no token")
    if SETTINGS.settings["control"]["key_file"] not in mounted:
        found.append("control.key_file is not mounted")
    if cluster["max_workers"] != len(cluster["provider"]["worker_ips"]):
        found.append("max_workers is not the number of workers")
    return found


def test_the_cluster_file_is_fit() -> None:
    assert problems(CLUSTER) == []


CHANGES: list[tuple[Callable[[dict[str, Any]], object], str]] = [
    (lambda c: c.update(workers=2), "'workers' was unexpected"),
    (lambda c: c["file_mounts"].pop("/home/disagg/.ray/auth_token"), "no token"),
    (
        lambda c: c["head_start_ray_commands"].__setitem__(1, "ray start --head"),
        "head_start_ray_commands: no token",
    ),
    (
        lambda c: c["worker_start_ray_commands"].__setitem__(1, "ray start"),
        "worker_start_ray_commands: no token",
    ),
    (lambda c: c["file_mounts"].pop("/home/disagg/control.json"), "key_file is not mounted"),
    (lambda c: c.update(max_workers=1), "max_workers"),
]


@pytest.mark.parametrize(("change", "complaint"), CHANGES, ids=[complaint for _, complaint in CHANGES])
def test_a_change_is_detected(change: Callable[[dict[str, Any]], object], complaint: str) -> None:
    changed = copy.deepcopy(CLUSTER)
    change(changed)
    assert any(complaint in one for one in problems(changed)), problems(changed)


def test_the_configuration_loads(tmp_path: Path) -> None:
    config = load(SETTINGS, tmp_path)
    assert config.prefill.tp != config.decode.tp
    assert config.control.host == "auto"


@pytest.mark.parametrize("path", ["deploy/README.md", "deploy/ray/README.md"])
def test_files_that_are_named_are_there(path: str) -> None:
    text = (ROOT / path).read_text()
    named = re.findall(r"\b(?:deploy|tests)/[\w./-]*\w", text)
    assert named
    for one in named:
        assert (ROOT / one).exists(), one
