"""Cases and an independent, slow, byte-wise oracle for the copy kernels."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from slow_parameters import sampled, thinned

from disagg.core.types import Span

POISON = 0xA5
MIDDLE = Span(1, 3)


@dataclass(frozen=True)
class Case:
    """One copy. `pool_shift` and `staged_shift`, in elements, move the tensors off their memory's start."""

    dtype: torch.dtype
    head_dim: int
    pool_heads: int
    heads: Span
    layers: Span = MIDDLE
    pool_layers: int = 4
    pool_slots: int = 23
    tokens: int = 9
    pool_shift: int = 0
    staged_shift: int = 0
    slot_dtype: torch.dtype = torch.int32
    planes: int = 2

    @property
    def itemsize(self) -> int:
        return torch.empty((), dtype=self.dtype).element_size()

    @property
    def pool_shape(self) -> tuple[int, int, int, int, int]:
        return (self.pool_layers, self.planes, self.pool_slots, self.pool_heads, self.head_dim)

    @property
    def nbytes(self) -> int:
        return len(self.layers) * self.planes * self.tokens * len(self.heads) * self.head_dim * self.itemsize

    def pool(self, device: str, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the whole allocation as bytes, the pool in it): random bits, or poison without a generator."""
        count = int(np.prod(self.pool_shape))
        allocation = _bytes((count + self.pool_shift) * self.itemsize, device, generator)
        return allocation, allocation.view(self.dtype)[self.pool_shift :].view(self.pool_shape)

    def staged(self, device: str, generator: torch.Generator | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(the whole allocation, the segment in it), with bytes on both sides of the segment."""
        allocation = _bytes(self.nbytes + self.staged_shift + 32, device, generator)
        return allocation, allocation[self.staged_shift : self.staged_shift + self.nbytes]

    def slots(self, device: str, generator: torch.Generator) -> torch.Tensor:
        """Distinct slots in no order."""
        chosen = torch.randperm(self.pool_slots, generator=generator)[: self.tokens]
        return chosen.to(device=device, dtype=self.slot_dtype)

    def byte_pairs(self, slots: torch.Tensor) -> list[tuple[int, int, int]]:
        """(byte in the pool, byte in the segment, length) of each head that the copy moves."""
        head_bytes = self.head_dim * self.itemsize
        pairs = []
        staged = 0
        for layer in self.layers:
            for plane in range(self.planes):
                for slot in slots.tolist():
                    for head in self.heads:
                        row = (
                            (layer * self.planes + plane) * self.pool_slots + slot
                        ) * self.pool_heads + head
                        pairs.append((row * head_bytes, staged, head_bytes))
                        staged += head_bytes
        assert staged == self.nbytes
        return pairs

    def gathered(self, pool: torch.Tensor, slots: torch.Tensor, before: torch.Tensor) -> np.ndarray:
        """What the staging allocation must hold after a gather, given what it held before."""
        expected, source = as_bytes(before).copy(), as_bytes(pool)
        for at, to, length in self.byte_pairs(slots):
            to += self.staged_shift
            expected[to : to + length] = source[at : at + length]
        return expected

    def scattered(self, staged: torch.Tensor, slots: torch.Tensor, before: torch.Tensor) -> np.ndarray:
        """What the pool's allocation must hold after a scatter, given what it held before."""
        expected, source = as_bytes(before).copy(), as_bytes(staged)
        for to, at, length in self.byte_pairs(slots):
            to += self.pool_shift * self.itemsize
            expected[to : to + length] = source[at : at + length]
        return expected


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's bytes, flat, on the CPU."""
    return tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def _bytes(count: int, device: str, generator: torch.Generator | None) -> torch.Tensor:
    if generator is None:
        return torch.full((count,), POISON, dtype=torch.uint8, device=device)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).to(device)


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.uint8]

DIMS = (1, 3, 8, 20)
SLICES = (Span(0, 1), Span(1, 3), Span(3, 6), Span(0, 4), Span(1, 6), Span(0, 6))
"""Every width of head slice, at both ends and in the middle of the pool's 6 heads."""
CASES = [
    *(Case(dtype, head_dim, 6, heads) for dtype in DTYPES for head_dim in DIMS for heads in SLICES),
    *(Case(torch.bfloat16, 16, count, Span(0, count)) for count in range(1, 6)),
    *(  # an address that only narrow words fit
        Case(torch.uint8, 16, 3, Span(1, 3), pool_shift=pool, staged_shift=staged)
        for pool, staged in ((1, 0), (0, 1), (2, 4), (4, 2), (8, 0), (0, 8), (16, 16))
    ),
    Case(torch.float8_e4m3fn, 12, 2, Span(1, 2)),
    *(Case(torch.uint8, 132, 4, heads, planes=1) for heads in (Span(0, 4), Span(1, 2), Span(1, 3))),
    Case(torch.bfloat16, 64, 2, Span(0, 2), slot_dtype=torch.int64),
    Case(torch.bfloat16, 64, 2, Span(1, 2), layers=Span(0, 4)),
    Case(torch.bfloat16, 64, 2, Span(1, 2), layers=Span(3, 4), tokens=1),
    Case(torch.float32, 256, 5, Span(1, 4), tokens=21),  # rows and tokens of several tiles
    Case(torch.uint8, 8, 1, Span(0, 1), pool_layers=1, layers=Span(0, 1), pool_slots=5000, tokens=4500),
    Case(torch.uint8, 24, 2, Span(1, 2), tokens=0),
    Case(torch.uint8, 24, 2, Span(1, 2), layers=Span(2, 2)),
    Case(torch.uint8, 24, 2, Span(1, 1)),
]
_SWEEP = {
    Case(dtype, head_dim, 6, heads): not marks
    for (dtype, head_dim, heads), marks, _ in thinned(DTYPES, DIMS, SLICES, by=4)
}
SAMPLED_CASES = sampled(CASES, lambda case: _SWEEP.get(case, True))
"""All cases, for `parametrize`: each pair of width and slice of heads is in the sample with one type."""
