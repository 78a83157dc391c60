"""The wheel: its files, its command, and what a package index shows."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("disagg", "kernels", "staging", "transport", "prefill_node", "decode_node", "deploy")
DATA = {"disagg/api/page.html"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Built from a copy, because a build writes into its folder."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir", str(out)]
    subprocess.run([sys.executable, "-m", "pip", "wheel", str(source), *options], check=True)
    [built] = out.glob("*.whl")
    return zipfile.ZipFile(built)


def read(wheel: zipfile.ZipFile, name: str) -> bytes:
    [found] = [one for one in wheel.namelist() if one.endswith(f".dist-info/{name}")]
    return wheel.read(found)


def test_every_module_and_the_page_are_inside(wheel: zipfile.ZipFile) -> None:
    modules = {str(file.relative_to(ROOT)) for name in PACKAGES for file in (ROOT / name).rglob("*.py")}
    assert {one for one in wheel.namelist() if ".dist-info/" not in one} == modules | DATA


def test_the_command(wheel: zipfile.ZipFile) -> None:
    assert read(wheel, "entry_points.txt") == b"[console_scripts]\ndisagg = disagg.cli.app:main\n"


def test_the_entry_in_a_package_index(wheel: zipfile.ZipFile) -> None:
    entry = message_from_bytes(read(wheel, "METADATA"))
    assert (entry["Name"], entry["License-Expression"], entry["Requires-Python"]) == (
        "disagg",
        "Apache-2.0",
        ">=3.11",
    )
    assert entry["Description-Content-Type"] == "text/markdown"
    assert entry["Keywords"]
    classifiers = entry.get_all("Classifier", [])
    assert "Operating System :: POSIX :: Linux" in classifiers
    assert "Environment :: GPU :: NVIDIA CUDA" in classifiers
