"""Measures page copies within a pool, as used by copy-on-write, against a plain copy of equal size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from disagg.bench.common.measure import copy_rate, host_us, random_bytes, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import ConfigError, InvariantError
from kernels.copy.page_copy import copy_pages

_ELEMENT_BYTES = 2


@dataclass(frozen=True)
class PageCopyBench:
    """Settings of a run."""

    device: torch.device
    row_bytes: tuple[int, ...]
    """Bytes of one token's K (or V) in one layer, over all heads of a rank in a 16-bit type."""
    nbytes: int
    """Bytes of all pages that are copied together; the pool is twice as large."""
    layers: int
    page_size: int
    repeats: int

    def __post_init__(self) -> None:
        for row in self.row_bytes:
            if row < _ELEMENT_BYTES or row % _ELEMENT_BYTES:
                raise ConfigError(f"rows of {row} bytes: give multiples of {_ELEMENT_BYTES}")
            if self.nbytes < self.page_bytes(row):
                raise ConfigError(
                    f"{self.nbytes} bytes hold no page of {self.page_size} tokens x {self.layers} layers with rows "
                    f"of {row} bytes: give at least {self.page_bytes(row)}"
                )

    def page_bytes(self, row_bytes: int) -> int:
        """Returns the bytes of a page, in all layers."""
        return 2 * self.layers * self.page_size * row_bytes

    def pool(self, row_bytes: int) -> torch.Tensor:
        """Returns a pool of noise, int16 `[layers, 2, slots, 1, elements]`."""
        pages = 2 * (self.nbytes // self.page_bytes(row_bytes))
        noise = random_bytes(pages * self.page_bytes(row_bytes), self.device).view(torch.int16)
        return noise.view(self.layers, 2, pages * self.page_size, 1, row_bytes // _ELEMENT_BYTES)


def run(bench: PageCopyBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures a rate for each row width, then the host time of a call. Raises `InvariantError` for wrong
    bytes."""
    report_progress("device copy")
    ceiling = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        report_progress(f"rows of {row_bytes} bytes")
        results.append(_measure(bench, row_bytes, ceiling))
    report_progress("launches")
    return [*results, _launch_times(bench)]


def _measure(bench: PageCopyBench, row_bytes: int, ceiling: Measurement) -> Result:
    pool = bench.pool(row_bytes)
    before = pool.clone()
    order = torch.randperm(pool.shape[2] // bench.page_size, generator=torch.Generator().manual_seed(0))
    sources, destinations = order.to(bench.device).view(2, -1)
    seconds = seconds_of(
        lambda: copy_pages(pool, sources, destinations, bench.page_size), bench.device, bench.repeats
    )
    check(before, pool, order, bench.page_size, "page copy")
    moved = 2 * len(sources) * bench.page_bytes(row_bytes)
    labels: dict[str, Label] = {
        "kernel": "page_copy",
        "row_bytes": row_bytes,
        "pages": len(sources),
        "layers": bench.layers,
        "page_size": bench.page_size,
    }
    rates = Measurement("page copy", "GB/s", tuple(moved / s / 1e9 for s in seconds))
    return Result(f"page copy, rows of {row_bytes} B", rates, ceiling, labels)


def check(before: torch.Tensor, after: torch.Tensor, order: torch.Tensor, page_size: int, what: str) -> None:
    """Raises `InvariantError`, which names `what`, unless the first half of the pages in `order` is unchanged, and
    the second half equals the first half."""
    paged = (len(before), 2, -1, page_size * before.shape[4])
    old, new = before.view(paged), after.view(paged)
    sources, destinations = order.to(before.device).view(2, -1)
    if not torch.equal(old[:, :, sources], new[:, :, destinations]):
        raise InvariantError(f"{what} moved wrong bytes")
    if not torch.equal(old[:, :, sources], new[:, :, sources]):
        raise InvariantError(f"{what} wrote outside of its pages")


def _launch_times(bench: PageCopyBench) -> Result:
    pool = torch.zeros(2, 2, 4 * bench.page_size, 1, 128, dtype=torch.int16, device=bench.device)
    sources, destinations = torch.arange(4, device=bench.device).view(2, -1)
    times = tuple(
        host_us(lambda: copy_pages(pool, sources, destinations, bench.page_size), bench.device)
        for _ in range(bench.repeats)
    )
    return Result(
        "page copy, host time of a call", Measurement("page copy", "us", times), None, {"kernel": "page_copy"}
    )
