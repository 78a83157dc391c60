"""Programmatic dependent launch: a kernel's programs are placed while the previous kernel's last programs still run.

Between two short kernels of a decode step, a GPU idles for the time that a launch takes. From compute capability 9.0
on, a kernel may be launched before the previous one in its stream has ended, and wait by itself for that end
(CUDA C++ Programming Guide, "Programmatic Dependent Launch and Synchronization").

Each kernel with an `OVERLAP` argument calls `wait_for_previous` before its first access to memory that a kernel of
its stream may have written. When this call returns, all writes of all earlier kernels are visible, and the next
kernel may be placed. Before this call, a kernel may only read what none of the step's latest kernels writes, because
a product by cuBLAS may let the next kernel be placed before its own wait. In a recorded step, weights, the step's
numbers and the states that the step before has left are old enough.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TypedDict

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from kernels.dispatch import INTERPRETED

_LEAST_CAPABILITY = (9, 0)
_MOST_ELEMENTS = 128 << 10
"""Largest number of elements of the hidden states of the steps that are faster with overlapping kernels (measured on
an H200). In larger steps launches matter less, and cuBLAS computes more products."""
_thread = threading.local()


class Overlap(TypedDict, total=False):
    """Arguments of a launch."""

    OVERLAP: bool
    launch_pdl: bool


@contextmanager
def overlapping(rows: int, hidden: int) -> Iterator[None]:
    """Inside the block, kernels that this thread launches or records overlap, if a step of `rows` rows with hidden
    states of `hidden` elements is faster so."""
    before = getattr(_thread, "on", False)
    _thread.on = rows * hidden <= _MOST_ELEMENTS
    try:
        yield
    finally:
        _thread.on = before


def overlap(device: torch.device) -> Overlap:
    """Returns the arguments for a launch on `device`; the launch overlaps inside `overlapping`."""
    if not getattr(_thread, "on", False) or not _supported(device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@lru_cache
def _supported(device: torch.device) -> bool:
    if INTERPRETED or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= _LEAST_CAPABILITY


@triton.jit  # type: ignore[untyped-decorator]
def wait_for_previous(OVERLAP: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803 - as throughout Triton
    """Waits until the previous kernel has ended, then allows the placement of the next one."""
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
