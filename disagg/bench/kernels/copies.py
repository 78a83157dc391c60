"""Measures gather and scatter against a plain copy on the same device, and the host time of a launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from disagg.bench.common.measure import copy_rate, host_us, random_bytes, seconds_of
from disagg.bench.common.report import Measurement, Result
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import Span
from kernels.copy.gather import gather
from kernels.copy.layout import segment_bytes
from kernels.copy.scatter import scatter

HEAD_BYTES = 256
"""Bytes of one head of 128 elements in a 16-bit type."""


@dataclass(frozen=True)
class KernelBench:
    """Settings of a run."""

    device: torch.device
    row_bytes: tuple[int, ...]
    """Bytes of one token's head slice, multiples of 256."""
    nbytes: int
    """Bytes of the segment."""
    layers: int
    page_size: int
    repeats: int

    def __post_init__(self) -> None:
        for row in self.row_bytes:
            if row < HEAD_BYTES or row % HEAD_BYTES:
                raise ConfigError(
                    f"rows of {row} bytes: give multiples of {HEAD_BYTES}, one head of 128 x 2 bytes"
                )
            if self._tokens(row) < 1:
                raise ConfigError(
                    f"{self.nbytes} bytes hold no page of {self.page_size} tokens x {self.layers} layers with rows "
                    f"of {row} bytes: give at least {2 * self.layers * row * self.page_size}"
                )

    def _tokens(self, row_bytes: int) -> int:
        return self.nbytes // (2 * self.layers * row_bytes) // self.page_size * self.page_size

    def case(self, row_bytes: int) -> CopyCase:
        """Returns a pool with a segment of the given row width. The pool has 8 heads, or more for wider rows."""
        heads = row_bytes // HEAD_BYTES
        all_heads = max(8, heads)
        first = (all_heads - heads) // 2
        tokens = self._tokens(row_bytes)
        shape = (self.layers, 2, 2 * tokens, all_heads, HEAD_BYTES // 2)
        size = self.layers * 2 * 2 * tokens * all_heads * HEAD_BYTES
        pool = random_bytes(size, self.device).view(torch.bfloat16).view(shape)
        order = torch.randperm(2 * tokens // self.page_size, device=self.device)[: tokens // self.page_size]
        offsets = torch.arange(self.page_size, device=self.device)
        slots = (order[:, None] * self.page_size + offsets).flatten().int()
        return CopyCase(pool, slots, Span(0, self.layers), Span(first, first + heads))


@dataclass(frozen=True)
class CopyCase:
    """A segment of half of a pool's tokens, in shuffled pages."""

    pool: torch.Tensor
    slots: torch.Tensor
    layers: Span
    heads: Span

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return segment_bytes(self.pool, len(self.slots), self.layers, self.heads)

    def rows(self, pool: torch.Tensor) -> torch.Tensor:
        """Returns the segment of `pool` as uint8 `[nbytes]`, by torch indexing, for comparison."""
        found = pool[:, :, self.slots.long(), self.heads.start : self.heads.stop]
        return found.contiguous().view(-1).view(torch.uint8)


def run(bench: KernelBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures both kernels for each row width, then launch times. Raises `InvariantError` for wrong bytes."""
    report_progress("device copy")
    ceiling = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        report_progress(f"rows of {row_bytes} bytes")
        results.extend(_measure(bench, bench.case(row_bytes), row_bytes, ceiling))
    report_progress("launches")
    return [*results, *_launch_times(bench)]


def _measure(bench: KernelBench, case: CopyCase, row_bytes: int, ceiling: Measurement) -> Iterator[Result]:
    staged = torch.zeros(case.nbytes, dtype=torch.uint8, device=bench.device)
    target = torch.full_like(case.pool, float("nan"))
    for name, work in (
        ("gather", lambda: gather(case.pool, case.slots, case.layers, case.heads, staged)),
        ("scatter", lambda: scatter(staged, target, case.slots, case.layers, case.heads)),
    ):
        seconds = seconds_of(work, bench.device, bench.repeats)
        rates = tuple(2 * case.nbytes / s / 1e9 for s in seconds)
        labels: dict[str, str | int | float] = {
            "kernel": name,
            "row_bytes": row_bytes,
            "tokens": len(case.slots),
            "layers": bench.layers,
            "page_size": bench.page_size,
        }
        yield Result(f"{name}, rows of {row_bytes} B", Measurement(name, "GB/s", rates), ceiling, labels)
    check(case, staged, target)


def check(case: CopyCase, staged: torch.Tensor, target: torch.Tensor) -> None:
    """Raises `InvariantError` unless the staging buffer and the pool `target` hold exactly the segment."""
    if not torch.equal(case.rows(case.pool), staged):
        raise InvariantError("gather moved wrong bytes")
    expected = torch.full_like(target, float("nan"))
    part = slice(case.heads.start, case.heads.stop)
    expected[:, :, case.slots.long(), part] = case.pool[:, :, case.slots.long(), part]
    if not torch.equal(expected.view(torch.int16), target.view(torch.int16)):
        raise InvariantError("scatter moved wrong bytes, or wrote outside of its slots")


def _launch_times(bench: KernelBench) -> Iterator[Result]:
    pool = torch.zeros(2, 2, 64, 8, HEAD_BYTES // 2, dtype=torch.bfloat16, device=bench.device)
    slots = torch.arange(16, device=bench.device).int()
    layers, heads = Span(0, 2), Span(0, 4)
    staged = torch.zeros(segment_bytes(pool, 16, layers, heads), dtype=torch.uint8, device=bench.device)
    for name, work in (
        ("gather", lambda: gather(pool, slots, layers, heads, staged)),
        ("scatter", lambda: scatter(staged, pool, slots, layers, heads)),
    ):
        times = tuple(host_us(work, bench.device) for _ in range(bench.repeats))
        yield Result(f"{name}, host time of a call", Measurement(name, "us", times), None, {"kernel": name})
