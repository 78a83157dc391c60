"""The architecture as import contracts, and packages that stay light to import."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = [
    "disagg",
    "disagg.core",
    "disagg.kv",
    "disagg.model",
    "disagg.router",
    "disagg.storage.files",
    "disagg.storage.remote",
    "kernels",
    "staging",
]
HEAVY = ("torch", "ray", "transformers", "ucxx", "matplotlib", "triton")


def run(*code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *code], cwd=ROOT, capture_output=True, text=True, check=False)


def test_contracts_hold() -> None:
    done = run(
        "-c", "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(cache_dir=None))"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "9 kept, 0 broken" in done.stdout


@pytest.mark.parametrize("package", [*PACKAGES, "transport", "prefill_node", "decode_node"])
def test_packages_are_light(package: str) -> None:
    done = run("-c", f"import sys, {package}; print([m for m in {HEAVY} if m in sys.modules])")
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
