"""The demo on two GPUs of this machine: prompts prefilled on one, decoded on the other.

    python deploy/local_two_gpu.py [flags of `disagg demo`]

With no flags it is `disagg demo`, which chooses the same placement where it finds two GPUs: prefill on the first,
decode on the second. `--prefill-tp 2 --decode-tp 1` makes the TP sizes differ; ranks of a group then share a GPU.
Without a GPU it runs on the CPU, over the same code path.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # runs from a checkout, installed or not

from disagg.cli import run

if __name__ == "__main__":
    sys.exit(run(["demo", *sys.argv[1:]]))
