"""Runs the demo on two GPUs of this machine: the first prefills the prompts, the second decodes the answers.

    python deploy/local_two_gpu.py [flags of `disagg demo`]

Without flags this script equals `disagg demo`, which also places prefill on the first of two GPUs and decode on the
second. With `--prefill-tp 2 --decode-tp 1`, the TP sizes differ and the two prefill ranks share a GPU. Without a GPU
the demo runs on the CPU, through the same code.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, installed or not

from disagg.cli.app import run

if __name__ == "__main__":
    sys.exit(run(["demo", *sys.argv[1:]]))
