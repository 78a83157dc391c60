"""The hardware's ceilings, measured in the same run as the benchmark: plain copies and the wire."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from disagg.bench.common.measure import copy_rate
from disagg.bench.common.processes import visible_gpus
from disagg.bench.common.raw_ucx import raw_rates
from disagg.bench.common.report import Measurement, Result

MIB = 1 << 20
RAW_SIZES = tuple(MIB // 16 << 2 * step for step in range(7))
"""Sizes of the measured messages: 64 KiB to 256 MiB."""


@dataclass(frozen=True)
class Ceilings:
    """The hardware's ceilings, as rates in GB/s (10^9 bytes moved per second)."""

    nbytes: int
    """Bytes of one plain copy."""
    copies: tuple[Measurement, ...]
    """Rates of copies within the device, and to a second device if there is one."""
    raw: dict[int, Measurement]
    """Rates of UCX messages between two processes, by message size in bytes."""

    @property
    def ceiling(self) -> Measurement:
        """The ceiling of a transfer: the plain copy between two devices, or within the only device."""
        return self.copies[-1]

    def results(self) -> list[Result]:
        """Returns a result for each ceiling."""
        wire = [
            Result(f"raw UCX, messages of {size_text(size)}", rate, self.ceiling, {"bytes": size})
            for size, rate in self.raw.items()
        ]
        return [*wire, *(Result(f"{copy.name}, {size_text(self.nbytes)}", copy) for copy in self.copies)]


def ceiling_bytes(cuda: bool) -> int:
    """Returns the size of a plain copy in bytes. It also limits the bytes that one measurement of the wire moves."""
    return 1024 * MIB if cuda else 32 * MIB


def measure_ceilings(
    cuda: bool, repeats: int, report_progress: Callable[[str], None] = lambda text: None
) -> Ceilings:
    """Measures copies, then the wire: between the first two GPUs, within the only GPU, or in host memory."""
    gpus, nbytes = visible_gpus() if cuda else [], ceiling_bytes(cuda)
    report_progress("copies")
    copies = _copies(cuda, len(gpus), nbytes, repeats)
    report_progress("raw UCX")
    raw = raw_rates(
        tuple(size for size in RAW_SIZES if size <= nbytes // 4),
        (gpus[0], gpus[1 % len(gpus)]) if gpus else (None, None),
        nbytes,
        repeats,
    )
    return Ceilings(nbytes, tuple(copies), raw)


def size_text(nbytes: int) -> str:
    """Formats bytes as '64 KiB' or '1.5 GiB'."""
    for unit, scale in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if nbytes >= 1 << scale:
            return f"{nbytes / (1 << scale):.4g} {unit}"
    return f"{nbytes} B"


def _copies(cuda: bool, gpus: int, nbytes: int, repeats: int) -> list[Measurement]:
    here = torch.device("cuda", 0) if cuda else torch.device("cpu")
    both_ways = copy_rate(here, here, nbytes, repeats)
    found = [Measurement("device copy", "GB/s", tuple(rate / 2 for rate in both_ways.values))]
    if gpus > 1:
        found.append(copy_rate(here, torch.device("cuda", 1), nbytes, repeats))
    if cuda:
        torch.cuda.empty_cache()
    return found
