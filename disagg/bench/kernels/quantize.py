"""Measures the quantizing gather against the plain gather: the sender's cost of halving the bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from disagg.bench.common.measure import copy_rate, host_us, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.kernels.copies import CopyCase, KernelBench
from disagg.core.errors import InvariantError
from disagg.core.types import Span, dtype_name, quantized_row_bytes
from kernels.copy.gather import gather
from kernels.copy.quantize import gather_quantized, gather_quantized_reference

DTYPES = (torch.int8, torch.float8_e4m3fn)


def run(bench: KernelBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the plain gather and a gather to each of `DTYPES`, for each row width. Raises `InvariantError`
    for wrong bytes.

    Rates count bytes read and written: a quantizing gather writes about half of the bytes it reads.
    """
    report_progress("device copy")
    ceiling = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        report_progress(f"rows of {row_bytes} bytes")
        case = bench.case(row_bytes)
        case.pool.normal_()  # random bits would include infinities
        results.extend(_measure(bench, case, row_bytes, ceiling))
    return results


def quantized_bytes(case: CopyCase) -> int:
    """Returns the bytes of the quantized segment, with scales."""
    head_dim = case.pool.shape[4]
    return case.nbytes // (2 * head_dim * case.pool.element_size()) * quantized_row_bytes(head_dim)


def check(case: CopyCase, dtype: torch.dtype, staged: torch.Tensor) -> None:
    """Raises `InvariantError` unless staging equals the reference's quantized segment bit for bit."""
    each = len(staged) // len(case.layers)
    expected = torch.empty(each, dtype=torch.uint8, device=staged.device)
    for layer in case.layers:  # one layer at a time: the reference works in float32
        found = staged[layer * each : (layer + 1) * each]
        gather_quantized_reference(case.pool, case.slots, Span(layer, layer + 1), case.heads, dtype, expected)
        if not torch.equal(found, expected):
            raise InvariantError(f"the gather to {dtype_name(dtype)} wrote wrong bytes in layer {layer}")


def _measure(bench: KernelBench, case: CopyCase, row_bytes: int, ceiling: Measurement) -> Iterator[Result]:
    place = (case.pool, case.slots, case.layers, case.heads)
    staged = torch.zeros(case.nbytes, dtype=torch.uint8, device=bench.device)

    def result(name: str, nbytes: int, work: Callable[[], None]) -> Result:
        seconds = seconds_of(work, bench.device, bench.repeats)
        rates = tuple((case.nbytes + nbytes) / s / 1e9 for s in seconds)
        labels: dict[str, Label] = {
            "kernel": name,
            "row_bytes": row_bytes,
            "written_bytes": nbytes,
            "tokens": len(case.slots),
            "layers": bench.layers,
            "page_size": bench.page_size,
            "us": 1e6 * sorted(seconds)[len(seconds) // 2],
            "host_us": host_us(work, bench.device),
        }
        return Result(f"{name}, rows of {row_bytes} B", Measurement(name, "GB/s", rates), ceiling, labels)

    yield result("gather", case.nbytes, lambda: gather(*place, staged))
    quantized = staged[: quantized_bytes(case)]
    for dtype in DTYPES:
        yield result(
            f"gather to {dtype_name(dtype)}",
            len(quantized),
            partial(gather_quantized, *place, dtype, quantized),
        )
        check(case, dtype, quantized)
