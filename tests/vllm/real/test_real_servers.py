"""Whole vLLM servers on a CPU, split by `DisaggConnector`: `make test-vllm`, two to four minutes for each run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

REASON = "vLLM is not installed; `make test-vllm` makes an environment with it"
pytest.importorskip("vllm.platforms", reason=REASON, exc_type=ImportError)

import torch
import vllm
from vllm.platforms import current_platform

ROOT = Path(__file__).parents[3]


def cpu_kernels() -> bool:
    """Whether this build of vLLM has kernels for CPUs that load with the installed torch."""
    if not current_platform.is_cpu():
        return False
    current_platform.import_kernels()
    return hasattr(torch.ops._C, "cpu_attention_with_kv_cache")  # noqa: SLF001


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("on_device.py", ()),
        ("on_device.py", ("--window", "100")),
        # vLLM 0.32's kernel of Mamba-2 for CPUs fails if a prompt has several blocks.
        ("on_device.py", ("--recurrent", "--vllm-arg=--block-size=1024")),
        ("on_device.py", ("--prefill-tp", "2", "--decode-tp", "2", "--peer-timeout", "60")),
        ("on_device.py", ("--chunked",)),
        ("on_device.py", ("--sync", "--early", "0.03")),
        ("under_load.py", ()),
    ],
)
def test_a_split_server_gives_the_tokens_of_one_server(
    script: str, options: tuple[str, ...], tmp_path: Path
) -> None:
    """Also with several KV cache groups, recurrent layers and two ranks each, and under load: clients leave, and the
    prefill server is killed and replaced."""
    if not cpu_kernels():
        pytest.skip("this build of vLLM has no kernels for a CPU and this torch")
    command = [sys.executable, str(ROOT / "tests/vllm" / script), "--cpu", "--dtype", "float32"]
    command += ["--seconds", "840", "--transport", "tls", "--tokens", "16", "--out", str(tmp_path)]
    command += options
    paths = {"VLLM_PP": str(Path(vllm.__file__).parents[1]), "DISAGG_PP": str(ROOT)}
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
