"""The demo on two GPUs of this machine: prompts prefilled on one, decoded on the other.

    python deploy/local_two_gpu.py [flags of `disagg demo`]

Without flags this is `disagg demo`, which chooses the same placement on two GPUs: prefill on the first, decode on the
second. With `--prefill-tp 2 --decode-tp 1` the TP sizes differ, and the ranks of a group share a GPU. Without a GPU
the demo runs on the CPU, on the same code path.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, installed or not

from disagg.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["demo", *sys.argv[1:]]))
