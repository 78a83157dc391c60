"""The gather that quantizes, beside the plain gather: what a sender pays for half of the bytes on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from disagg.bench.kernels import Case, KernelBench
from disagg.bench.measure import copy_rate, host_us, seconds_of
from disagg.bench.report import Label, Measurement, Result
from disagg.core.errors import InvariantError
from disagg.core.types import Span, code_row_bytes
from disagg.kv.pool import dtype_name
from kernels.gather import gather
from kernels.quantize import gather_codes, gather_codes_reference

DTYPES = (torch.int8, torch.float8_e4m3fn)


def run(bench: KernelBench, tell: Callable[[str], None] = lambda text: None) -> list[Result]:
    """For each width of row the plain gather, and one to each of `DTYPES`. Raises `InvariantError` for wrong bytes.

    Rates are of bytes read and written: a gather to codes writes about half of what it reads.
    """
    tell("device copy")
    ceiling = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        tell(f"rows of {row_bytes} bytes")
        case = bench.case(row_bytes)
        case.pool.normal_()  # noise in every bit is infinite now and then
        results.extend(_measure(bench, case, row_bytes, ceiling))
    return results


def code_bytes(case: Case) -> int:
    """Of the segment as codes, with their scales."""
    head_dim = case.pool.shape[4]
    return case.nbytes // (2 * head_dim * case.pool.element_size()) * code_row_bytes(head_dim)


def check(case: Case, dtype: torch.dtype, staged: torch.Tensor) -> None:
    """Raises `InvariantError` unless staging holds what the reference makes of the segment, bit for bit."""
    each = len(staged) // len(case.layers)
    expected = torch.empty(each, dtype=torch.uint8, device=staged.device)
    for layer in case.layers:  # one at a time: the reference works in float32
        found = staged[layer * each : (layer + 1) * each]
        gather_codes_reference(case.pool, case.slots, Span(layer, layer + 1), case.heads, dtype, expected)
        if not torch.equal(found, expected):
            raise InvariantError(f"the gather to {dtype_name(dtype)} wrote wrong bytes in layer {layer}")


def _measure(bench: KernelBench, case: Case, row_bytes: int, ceiling: Measurement) -> Iterator[Result]:
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
    codes = staged[: code_bytes(case)]
    for dtype in DTYPES:
        yield result(
            f"gather to {dtype_name(dtype)}", len(codes), partial(gather_codes, *place, dtype, codes)
        )
        check(case, dtype, codes)
