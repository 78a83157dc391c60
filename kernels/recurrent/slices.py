"""Slices of a packed step, which name the tokens and the state slot of each sequence, and shared argument checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from disagg.core.errors import ConfigError
from kernels.attention.layer_kv import describe
from kernels.dispatch import Backend, backend

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Slice(NamedTuple):
    """Consecutive tokens of one sequence in a packed step."""

    slot: int
    """Slot of the sequence's state."""
    first: int
    """Index of the first token among the step's tokens."""
    tokens: int
    """Number of tokens."""
    begun: bool
    """Whether the slot holds the state after earlier tokens of the sequence. If not, the state counts as zero."""


@dataclass(frozen=True)
class PackedSlices:
    """Slices of several sequences. No two slices have the same slot, except for the trash slot of padding."""

    slots: torch.Tensor
    """int64 `[n]`, like `firsts`, `counts` and `begun`; see `Slice` for their meaning."""
    firsts: torch.Tensor
    counts: torch.Tensor
    begun: torch.Tensor
    """1 if the slot holds a state of earlier tokens, else 0."""
    most: int
    """Upper bound of `counts`."""
    host: tuple[Slice, ...] | None
    """The slices on the host. None: the host does not know the slices, but each has one token, and its slot holds a
    state of earlier tokens."""

    @staticmethod
    def of(slices: list[Slice], device: torch.device | str = "cpu") -> PackedSlices:
        """Returns `slices` with their numbers copied to the device, in one transfer and without synchronization."""
        numbers = torch.tensor([[int(number) for number in one] for one in slices], dtype=torch.int64)
        numbers = numbers.view(-1, 4).t().contiguous()
        if torch.device(device).type == "cuda":
            numbers = numbers.pin_memory()
        most = max((one.tokens for one in slices), default=0)
        slots, firsts, counts, begun = numbers.to(device, non_blocking=True)
        return PackedSlices(slots, firsts, counts, begun, most, tuple(slices))

    @staticmethod
    def single(slots: torch.Tensor, firsts: torch.Tensor) -> PackedSlices:
        """Returns slices of one token each, which follow earlier tokens. The host does not read the tensors."""
        ones = torch.ones_like(slots)
        return PackedSlices(slots, firsts, ones, ones, 1, None)

    def __len__(self) -> int:
        return len(self.slots)


def uses_triton(how: Backend, device: torch.device) -> bool:
    """Returns whether `how` is `triton`. Raises ConfigError if it is, but Triton does not run on `device`."""
    if how == "torch":
        return False
    if backend(device) != "triton":
        raise ConfigError(f"model.recurrent_kernels = triton: Triton does not run on {device} here")
    return True


def require_shapes(**expected: tuple[torch.Tensor, tuple[int, ...]]) -> None:
    """Raises ValueError unless each tensor is float, has the given shape, and is contiguous in the last dimension."""
    for name, (tensor, shape) in expected.items():
        dense = tensor.shape[-1] == 1 or tensor.stride(-1) == 1
        if tuple(tensor.shape) != shape or not dense or tensor.dtype not in DTYPES:
            raise ValueError(
                f"{name} must be float {list(shape)}, contiguous in the last dimension; got {describe(tensor)}"
            )
