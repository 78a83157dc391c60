"""What the checksum of a segment costs: each copy kernel with it, against the same kernel without it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from disagg.bench.kernels import Case, KernelBench
from disagg.bench.measure import copy_rate, host_us, seconds_of
from disagg.bench.report import Label, Measurement, Result
from disagg.core.errors import InvariantError
from kernels.checksum import Check, Origin, Summer
from kernels.gather import gather
from kernels.move import prepare_move
from kernels.rows import Place
from kernels.scatter import scatter
from kernels.sum_rows import sum_rows

_ORIGIN = Origin(layer=0, token=0, head=0)


def run(bench: KernelBench, tell: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Pairs of rates, and host times of a call. Raises `InvariantError` when two sums of the same bytes differ."""
    tell("device copy")
    copy = copy_rate(bench.device, bench.device, bench.nbytes, bench.repeats)
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        tell(f"rows of {row_bytes} bytes")
        results.extend(_Sums(bench, bench.case(row_bytes), row_bytes, copy).results())
    return results


class _Sums:
    """One width of row."""

    def __init__(self, bench: KernelBench, case: Case, row_bytes: int, copy: Measurement) -> None:
        self._bench, self._case, self._row_bytes, self._copy = bench, case, row_bytes, copy
        self._staged = torch.zeros(case.nbytes, dtype=torch.uint8, device=bench.device)
        self._target = torch.zeros_like(case.pool)
        self._summer = Summer(bench.device)
        self._totals: list[torch.Tensor] = []
        self._fence = torch.zeros(1, dtype=torch.int64, device=bench.device)

    def results(self) -> Iterator[Result]:
        case = self._case
        at = (case.slots, case.layers, case.heads)
        source, target = Place(case.pool, *at), Place(self._target, *at)
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
        for title, asked in ((name, None), (f"{name} with its sum", check)):
            times = tuple(host_us(lambda asked=asked: work(asked), device) for _ in range(3))  # type: ignore[misc]
            yield self._result(f"{title}, host time of a call", Measurement(title, "us", times), None)

    def _check(self) -> Check:
        self._totals.append(torch.zeros(1, dtype=torch.int64, device=self._bench.device))
        return Check(self._summer, _ORIGIN, self._totals[-1])

    def _rate(self, work: Callable[[], object], touched: int) -> Measurement:
        """`touched`: 2 where bytes are read and written."""
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
