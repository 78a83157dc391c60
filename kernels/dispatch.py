"""Which implementation of a kernel runs: Triton on CUDA, torch on the CPU, or what `DISAGG_KERNELS` says."""

from __future__ import annotations

import os
from typing import Literal

import torch

from disagg.core.errors import ConfigError

Backend = Literal["torch", "triton"]

VARIABLE = "DISAGG_KERNELS"

# `triton.jit` reads it when a kernel's module is imported; a later change would not be heeded.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
"""Kernels run in Triton's interpreter, on the CPU."""


def backend(device: torch.device) -> Backend:
    """The implementation to use for tensors on `device`.

    Raises ConfigError when `DISAGG_KERNELS` is neither `torch` nor `triton`, or asks for Triton on a device
    that it cannot compile for (a CPU needs `TRITON_INTERPRET=1` in the environment from the start).
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
