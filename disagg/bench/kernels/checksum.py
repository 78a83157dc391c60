"""Measures the cost of a segment's checksum: the rate of each copy kernel with and without a checksum."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from disagg.bench.common.measure import copy_rate, host_us, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.kernels.copies import CopyCase, KernelBench
from disagg.core.errors import InvariantError
from kernels.copy.checksum import Check, Origin, Summer
from kernels.copy.gather import gather
from kernels.copy.move import prepare_move
from kernels.copy.rows import PoolSlice
from kernels.copy.scatter import scatter
from kernels.copy.sum_rows import sum_rows

_ORIGIN = Origin(layer=0, token=0, head=0)


def run(bench: KernelBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures each copy kernel with and without a checksum: its rate, and the host time of a call. Raises
    `InvariantError` when two checksums of the same bytes differ."""
    report_progress("device copy")
    copy = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        report_progress(f"rows of {row_bytes} bytes")
        results.extend(_Sums(bench, bench.case(row_bytes), row_bytes, copy).results())
    return results


class _Sums:
    """Measures copies with and without checksums, for rows of one width."""

    def __init__(self, bench: KernelBench, case: CopyCase, row_bytes: int, copy: Measurement) -> None:
        self._bench, self._case, self._row_bytes, self._copy = bench, case, row_bytes, copy
        self._staged = torch.zeros(case.nbytes, dtype=torch.uint8, device=bench.device)
        self._target = torch.zeros_like(case.pool)
        self._summer = Summer(bench.device)
        self._totals: list[torch.Tensor] = []
        self._fence = torch.zeros(1, dtype=torch.int64, device=bench.device)

    def results(self) -> Iterator[Result]:
        case = self._case
        at = (case.slots, case.layers, case.heads)
        source, target = PoolSlice(case.pool, *at), PoolSlice(self._target, *at)
        works: dict[str, Callable[[Check | None], object]] = {
            "gather": lambda check: gather(*source, self._staged, check),
            "scatter": lambda check: scatter(self._staged, self._target, *at, check),
            "write within the GPU": lambda check: prepare_move(source, target, self._fence, 0, check)(),
        }
        for name, work in works.items():
            yield from self._pair(name, work)
        read = self._check()
        yield self._result("sum alone", self._rate(lambda: sum_rows(target, read), 1), self._copy)
        self._compare()

    def _pair(self, name: str, work: Callable[[Check | None], object]) -> Iterator[Result]:
        check = self._check()
        plain = self._rate(lambda: work(None), 2)
        yield self._result(name, plain, self._copy)
        yield self._result(f"{name} with its sum", self._rate(lambda: work(check), 2), plain)
        device = self._bench.device
        for title, wanted in ((name, None), (f"{name} with its sum", check)):
            times = tuple(host_us(lambda wanted=wanted: work(wanted), device) for _ in range(3))  # type: ignore[misc]
            yield self._result(f"{title}, host time of a call", Measurement(title, "us", times), None)

    def _check(self) -> Check:
        self._totals.append(torch.zeros(1, dtype=torch.int64, device=self._bench.device))
        return Check(self._summer, _ORIGIN, self._totals[-1])

    def _rate(self, work: Callable[[], object], touched: int) -> Measurement:
        """Measures the byte rate of `work`. `touched`: accesses per byte, 2 if bytes are read and written."""
        seconds = seconds_of(work, self._bench.device, self._bench.repeats)
        return Measurement("rate", "GB/s", tuple(touched * self._case.nbytes / s / 1e9 for s in seconds))

    def _result(self, name: str, found: Measurement, ceiling: Measurement | None) -> Result:
        labels: dict[str, Label] = {
            "kernel": name,
            "row_bytes": self._row_bytes,
            "tokens": len(self._case.slots),
        }
        return Result(f"{name}, rows of {self._row_bytes} B", found, ceiling, labels)

    def _compare(self) -> None:
        found = {int(total) for total in self._totals}
        if len(found) != 1 or found == {0}:
            raise InvariantError(f"the kernels found different sums of the same bytes: {sorted(found)}")
