"""The Triton kernels themselves, without a GPU: their tests again, in a process that interprets Triton.

Triton decides at import whether to interpret, so a process that has imported the kernels is too late for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
ROOT = FOLDER.parent.parent
COPIES = (
    "copy/test_copy_kernels.py",
    "copy/test_move_kernel.py",
    "copy/test_page_copy.py",
    "copy/test_checksum.py",
    "copy/test_quantize.py",
)
ATTENTION = (
    "attention/test_prefill_attention.py",
    "attention/test_decode_attention.py",
    "attention/test_kv_write.py",
)
LAYERS = ("layers/test_small_layers.py", "layers/test_rank_sum.py")
SWEEPS = (
    "attention/test_prefill_attention.py",
    "attention/test_decode_attention.py",
    "copy/test_checksum.py",
)


def interpret(*command: str) -> None:
    """Runs `command` under this Python with the Triton backend interpreted; fails with its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "DISAGG_KERNELS": "triton", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    ("files", "marked"),
    [
        pytest.param((*COPIES, *LAYERS), "not slow and not gpu", id="copies and small layers"),
        pytest.param(ATTENTION, "not slow and not gpu", id="attention"),
        pytest.param(SWEEPS, "slow and not gpu", id="rest of the sweeps", marks=pytest.mark.slow),
    ],
)
def test_tests_pass_in_the_interpreter(files: tuple[str, ...], marked: str) -> None:
    interpret(
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-m",
        marked,
        "-k",
        "not reference and not cuda",
        *(str(FOLDER / name) for name in files),
    )
