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


def interpret(*command: str) -> None:
    """Runs `command` under this Python with the Triton backend interpreted; fails with its output."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "DISAGG_KERNELS": "triton", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]


@pytest.mark.parametrize(
    "files",
    [
        ("test_copy_kernels.py", "test_move_kernel.py", "test_page_copy.py", "test_checksum.py"),
        ("test_decode_attention.py", "test_prefill_attention.py", "test_kv_write.py", "test_quantize.py"),
        ("test_small_layers.py", "test_rank_sum.py"),
    ],
    ids=["copies", "attention", "small layers"],
)
def test_tests_pass_in_the_interpreter(files: tuple[str, ...]) -> None:
    interpret(
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-k",
        "not reference and not cuda",
        *(str(FOLDER / name) for name in files),
    )
