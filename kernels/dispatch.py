"""Selects the implementation of a kernel: Triton on CUDA, torch on the CPU, or as set by `DISAGG_KERNELS`."""

from __future__ import annotations

import os
from typing import Literal

import torch

from disagg.core.errors import ConfigError

Backend = Literal["torch", "triton"]

VARIABLE = "DISAGG_KERNELS"

# `triton.jit` reads the variable when a kernel's module is imported; later changes have no effect.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Whether Triton kernels run in Triton's interpreter, on the CPU."""


def backend(device: torch.device) -> Backend:
    """Returns the implementation for tensors on `device`.

    Raises ConfigError when `DISAGG_KERNELS` is neither `torch` nor `triton`, and for `triton` on a device without
    compiler support. On a CPU, Triton needs `TRITON_INTERPRET=1` in the environment when the process starts.
    """
    wanted = os.environ.get(VARIABLE, "")
    if wanted == "":
        return "triton" if device.type == "cuda" else "torch"
    if wanted == "torch":
        return "torch"
    if wanted != "triton":
        raise ConfigError(f"{VARIABLE}={wanted!r}: must be 'torch' or 'triton', or unset to choose by device")
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            f"{VARIABLE}=triton with tensors on {device}: start the process with TRITON_INTERPRET=1, "
            f"or unset {VARIABLE}"
        )
    return "triton"
