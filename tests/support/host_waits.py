"""Detection of calls that make the host wait for a CUDA device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def no_host_waits() -> Iterator[None]:
    """Within the context, a call that makes the host wait for the device raises RuntimeError.

    The mode is one of the whole process: a test that left it on would fail all tests after it.
    """
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Synchronization debug mode", UserWarning)
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
