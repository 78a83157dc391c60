"""`disagg bench transfer --peer nixl`: measures NIXL with the same requests, in the same run as this project.

Only one pair of ranks is measured with NIXL: the pair of the first route. If the groups' sizes differ, NIXL therefore
moves only a part of the bytes that this project moves in the compared time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from disagg.bench.common.ceilings import size_text
from disagg.bench.common.processes import Processes, Remote, SilentError, visible_gpus
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.nixl.ranks import WAYS, NixlOptions, NixlProbe, NixlRank, NixlTransfer
from disagg.bench.transfer.pools import TransferBench
from disagg.core.types import Shard
from staging.routes import plan_routes
from staging.shards import make_shards

MOST_S = 60.0
"""Time limit for one transfer, and for all repeats of one way of creating descriptors. The report marks a measurement
that was ended by this limit."""
_HOW = {
    "prepared": "descriptors chosen from lists of all pages that were prepared once",
    "built": "descriptors built for the request",
}


@dataclass(frozen=True)
class Pair:
    """A source rank, a destination rank, and the part that is sent between them."""

    shards: tuple[Shard, Shard]
    part: Shard
    routes: int
    """Number of routes of the whole transfer, of which the pair covers one."""

    @classmethod
    def of(cls, bench: TransferBench) -> Pair:
        """Returns the pair of the first route."""
        layout = bench.layout
        source, destination = (
            make_shards(layout.layers, layout.kv_heads, tp) for tp in (bench.prefill_tp, bench.decode_tp)
        )
        routes = plan_routes(source, destination)
        first = routes[0]
        part = Shard(first.src_rank, first.layers, first.heads)
        return cls((source[first.src_rank], destination[first.dst_rank]), part, len(routes))

    def nbytes(self, bench: TransferBench, tokens: int) -> int:
        """Returns the bytes that the source writes for one request."""
        return len(self.part.layers) * len(self.part.heads) * bench.layout.cell_bytes * tokens


@dataclass(frozen=True)
class NixlResult:
    """Transfer times with one way of creating descriptors (`WAYS`)."""

    way: str
    moved: tuple[NixlTransfer, ...]
    given_up: bool = False
    """Whether the measurement ended early, because a transfer took longer than `MOST_S`. `moved` lacks this
    transfer."""

    def us(self, seconds: Callable[[NixlTransfer], float]) -> Measurement:
        """Returns one time of each transfer in microseconds; `seconds` selects the time."""
        return Measurement("NIXL", "us", tuple(seconds(moved) * 1e6 for moved in self.moved))


def require() -> None:
    """Raises `ConfigError` when NIXL cannot be imported; tests it in a child process, as NIXL brings its own
    UCX."""
    with Processes() as processes:
        processes.start("NIXL probe", None, NixlProbe).call("check")


def compare(
    bench: TransferBench,
    ours: Sequence[Result],
    threads: int,
    report_progress: Callable[[str], None] = lambda text: None,
) -> list[Result]:
    """Returns `ours` followed by NIXL's figures for the same requests. Raises `InvariantError` for wrong bytes."""
    pair, results = Pair.of(bench), list(ours)
    for tokens in bench.tokens:
        report_progress(f"NIXL, {tokens} tokens")
        for found in measure(bench, pair, tokens, threads):
            results += _results(bench, pair, tokens, threads, found, ours)
    return results


def measure(bench: TransferBench, pair: Pair, tokens: int, threads: int) -> list[NixlResult]:
    """Measures both ways of creating descriptors, with one child process for each of the two ranks.

    A transfer that takes longer than `MOST_S` ends the measurement.
    """
    gpus = visible_gpus() if bench.cuda else []
    found: list[NixlResult] = []
    with Processes() as processes:
        ranks = [
            processes.start(
                f"NIXL {side}",
                gpus[number % len(gpus)] if gpus else None,
                NixlRank,
                _options(bench, pair, tokens, threads, number),
            )
            for number, side in enumerate(("source", "destination"))
        ]
        source, destination = ranks
        source.call("connect", destination.call("info"))
        source.call("fill")
        for way in WAYS:
            found.append(_moved(source, destination, way, bench.repeats))
            if found[-1].given_up:
                break  # the source process is still blocked in the transfer
    return found


def _options(bench: TransferBench, pair: Pair, tokens: int, threads: int, side: int) -> NixlOptions:
    page_size = (bench.prefill_page_size, bench.decode_page_size)[side]
    slots = bench.pool_slots(page_size)
    alone = next(case for case in bench.cases() if case.tokens == tokens and case.in_flight == 1)
    return NixlOptions(
        name=("source", "destination")[side],
        shard=pair.shards[side],
        part=pair.part,
        layout=bench.layout,
        page_size=page_size,
        pool_slots=slots,
        pages=tuple(alone.pages(page_size, slots)[0]),
        tokens=tokens,
        threads=threads,
        cuda=bench.cuda,
    )


def _moved(source: Remote, destination: Remote, way: str, repeats: int) -> NixlResult:
    found: list[NixlTransfer] = []
    ends_s = time.monotonic() + MOST_S
    for number in range(repeats + 1):
        destination.call("poison")
        source.start_call("move", way)
        try:
            moved: NixlTransfer = source.answer(MOST_S)
        except SilentError:
            return NixlResult(way, tuple(found), given_up=True)
        destination.call("check")
        if number:  # the first transfer opens connections and maps memory
            found.append(moved)
        if found and time.monotonic() > ends_s:
            break
    return NixlResult(way, tuple(found))


def _results(
    bench: TransferBench, pair: Pair, tokens: int, threads: int, found: NixlResult, ours: Sequence[Result]
) -> Iterator[Result]:
    nbytes = pair.nbytes(bench, tokens)
    name = f"NIXL, {tokens} tokens ({size_text(nbytes)}), {found.way}"
    labels: dict[str, Label] = {
        "tokens": tokens,
        "bytes": nbytes,
        "prefill_tp": bench.prefill_tp,
        "decode_tp": bench.decode_tp,
        "heads": str(pair.part.heads),
        "routes": pair.routes,
        "descriptors_from": found.way,
        "threads": threads,
    }
    if not found.moved:
        limit = Measurement("NIXL", "us", (MOST_S * 1e6,))
        note = f"the transfer was not complete after {MOST_S:g} s and was given up: a lower bound, not a measurement"
        yield Result(f"{name}: given up", limit, labels=labels | {"given_up": 1}, definition=note)
        return
    count = found.moved[0].descriptors
    labels |= {"descriptors": count}
    own, ceiling = _ours(ours, tokens)
    wire_s = tuple(moved.transfer_s for moved in found.moved)
    rate = Measurement("NIXL", "GB/s", tuple(nbytes / s / 1e9 for s in wire_s))
    total = found.us(lambda moved: moved.descriptors_s + moved.transfer_s)
    yield Result(f"{name}: transfer", rate, ceiling, labels)
    yield Result(f"{name}: {count} descriptors", found.us(lambda moved: moved.descriptors_s), None, labels)
    yield Result(f"{name}: transfer", found.us(lambda moved: moved.transfer_s), None, labels, "", own)
    yield Result(f"{name}: in total", total, None, labels, _definition(bench, pair, found), own)


def _definition(bench: TransferBench, pair: Pair, found: NixlResult) -> str:
    part, note = pair.part, ""
    if pair.routes > 1:
        note = (
            f"; one of {pair.routes} such slices (heads {part.heads} of {bench.layout.kv_heads}), while this "
            "project's time covers all of them"
        )
    if len(found.moved) < bench.repeats:
        note += f"; {len(found.moved)} of {bench.repeats} repeats, because of the time limit"
    return (
        "one source rank writes the KV that one destination rank needs, until the source sees the last completion; "
        f"{_HOW[found.way]}{note}"
    )


def _ours(ours: Sequence[Result], tokens: int) -> tuple[Measurement, Measurement | None]:
    """Returns this project's time for a request of `tokens` alone, and the ceiling of its rate."""
    alone = [
        result
        for result in ours
        if result.labels.get("tokens") == tokens
        and result.labels.get("in_flight") == 1
        and result.labels.get("leases_ahead")
    ]
    rate, time_of_one = (
        next(result for result in alone if result.measured.unit == unit) for unit in ("GB/s", "us")
    )
    return time_of_one.measured, rate.ceiling
