"""KV transfers from pool to pool between two groups of ranks, with the real senders and receivers but without
a model.

This process acts as both leaders: it opens requests, reports their KV as computed, and receives the landings.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from disagg.bench.common.ceilings import Ceilings, ceiling_bytes, measure_ceilings, size_text
from disagg.bench.common.noise import check_layout
from disagg.bench.common.processes import Processes, Remote, call_all, visible_gpus
from disagg.bench.common.ranks import RankOptions, transport_choice
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.transfer.hosts import DecodeHost, PrefillHost
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RequestKey, Span, Ticket
from disagg.kv.pages import pages_for
from disagg.node.links import Link, make_link
from staging.shards import make_shards
from transport.control import messages as m
from transport.keys.curve import make_keys

COMPUTE_S = 0.005
"""Simulated duration of a model's step. Leases are requested before the step; the KV exists after it."""


@dataclass(frozen=True)
class TransferBench:
    """Settings of a run."""

    layout: KVLayout
    tokens: tuple[int, ...]
    """Request sizes, in tokens."""
    in_flight: int
    """Number of requests in flight in the back-to-back rounds."""
    repeats: int
    cuda: bool
    prefill_tp: int = 1
    decode_tp: int = 1
    prefill_page_size: int = 16
    decode_page_size: int = 16
    config: Config = field(default_factory=Config)
    """Configuration, of which only the sections `transfer`, `transport` and `control` are used."""

    def __post_init__(self) -> None:
        check_layout(self.layout)
        if not self.tokens or min(self.tokens) < 1:
            raise ConfigError(f"requests of {self.tokens} tokens: give 1 or more")
        if self.config.transport.backend == "inproc":
            raise ConfigError(
                "transport.backend = inproc works within one process only; each rank of this benchmark is a process"
            )

    @property
    def ceiling_bytes(self) -> int:
        """Size of a plain copy in bytes, which also limits the bytes of one measurement."""
        return ceiling_bytes(self.cuda)

    def cases(self) -> tuple[TransferRound, ...]:
        """Returns three rounds for each size: one request at a time with early leases, one request at a time without
        early leases, and `in_flight` requests at a time."""
        found: list[TransferRound] = []
        for tokens in self.tokens:
            nbytes = tokens * self.layout.token_bytes
            few = min(16, max(1, self.ceiling_bytes // 4 // nbytes))
            many = max(2 * self.in_flight, min(8 * self.in_flight, self.ceiling_bytes // nbytes))
            found += [
                TransferRound(tokens, few, 1),
                TransferRound(tokens, few, 1, ahead=False),
                TransferRound(tokens, many, self.in_flight),
            ]
        return tuple(found)

    def pool_slots(self, page_size: int) -> int:
        """Returns the number of pool slots for the largest round and the padding page."""
        return page_size * (1 + max(case.count * pages_for(case.tokens, page_size) for case in self.cases()))

    def landed_bytes(self, tokens: int) -> int:
        """Returns the bytes that land on all decode ranks for one request; replicated heads count on each rank."""
        shards = make_shards(self.layout.layers, self.layout.kv_heads, self.decode_tp)
        heads = sum(len(shard.heads) for shard in shards)
        return tokens * self.layout.token_bytes // self.layout.kv_heads * heads


@dataclass(frozen=True)
class TransferRound:
    """A round of requests that are checked together."""

    tokens: int
    count: int
    in_flight: int
    ahead: bool = True
    """Whether leases are requested before the KV is computed, as in a real step."""

    def pages(self, page_size: int, slots: int) -> list[list[int]]:
        """Returns the pages of each request, shuffled."""
        each = pages_for(self.tokens, page_size)
        drawn = random.Random(self.tokens).sample(range(1, slots // page_size), each * self.count)
        return [drawn[i : i + each] for i in range(0, len(drawn), each)]


def run(bench: TransferBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the ceilings, then the transfers of requests. Raises `InvariantError` for wrong or misplaced bytes."""
    ceilings = measure_ceilings(bench.cuda, bench.repeats, report_progress)
    results: list[Result] = []
    with Processes() as processes:
        groups = TransferGroups(bench, processes, visible_gpus() if bench.cuda else [])
        for case in bench.cases():
            report_progress(f"requests of {case.tokens} tokens, {case.in_flight} in flight, by {groups.path}")
            results.extend(_results(bench, case, groups.path, groups.measure(case), ceilings))
    return [*results, *ceilings.results()]


def _results(
    bench: TransferBench, case: TransferRound, path: str, seconds: Sequence[float], ceilings: Ceilings
) -> Iterator[Result]:
    nbytes = bench.landed_bytes(case.tokens)
    transfer = bench.config.transfer
    labels: dict[str, Label] = {
        "tokens": case.tokens,
        "bytes": nbytes,
        "in_flight": case.in_flight,
        "leases_ahead": case.ahead,
        "requests": case.count,
        "prefill_tp": bench.prefill_tp,
        "decode_tp": bench.decode_tp,
        "prefill_page_size": bench.prefill_page_size,
        "decode_page_size": bench.decode_page_size,
        "dtype": bench.layout.dtype,
        "layers": bench.layout.layers,
        "kv_heads": bench.layout.kv_heads,
        "head_dim": bench.layout.head_dim,
        "transport": transport_choice(bench.config).name,
        "path": path,
        "layer_groups": transfer.layer_groups,
        "ring_bytes": transfer.ring_bytes,
        "staging_bytes": transfer.staging_bytes,
        "checksum": int(bool(transfer.checksum)),
    }
    moved = nbytes if case.in_flight == 1 else nbytes * case.count
    name = f"{case.tokens} tokens ({size_text(nbytes)}) by {path}"
    rate = Measurement("pool to pool", "GB/s", tuple(moved / s / 1e9 for s in seconds))
    latency = Measurement("pool to pool", "us", tuple(s * 1e6 for s in seconds))
    if case.in_flight > 1:
        yield Result(f"{name}, {case.in_flight} in flight", rate, ceilings.ceiling, labels)
    elif case.ahead:
        yield Result(f"{name}, one at a time", rate, ceilings.ceiling, labels)
        yield Result(f"{name}, time of one", latency, None, labels)
    else:
        yield Result(f"{name}, time of one and its leases", latency, None, labels)


class TransferGroups:
    """The prefill and the decode group; this class sends them the messages that their leaders would send."""

    def __init__(self, bench: TransferBench, processes: Processes, gpus: Sequence[str]) -> None:
        self._bench = bench
        self._tickets = itertools.count(1)
        sizes = (bench.prefill_page_size, bench.decode_page_size)
        self._page_sizes, self._slots = sizes, tuple(bench.pool_slots(size) for size in sizes)
        keys = make_keys()

        def start(kind: type[PrefillHost | DecodeHost], tp: int, side: int, first_gpu: int) -> list[Remote]:
            rows = max(case.count for case in bench.cases())
            shape = (sizes[side], self._slots[side], rows, bench.config, keys, bench.cuda)
            return [
                processes.start(
                    f"{kind.role} rank {rank}",
                    gpus[(first_gpu + rank) % len(gpus)] if gpus else None,
                    kind,
                    RankOptions(rank, tp, bench.layout, *shape),
                )
                for rank in range(tp)
            ]

        self._prefill = start(PrefillHost, bench.prefill_tp, 0, 0)
        self._decode = start(DecodeHost, bench.decode_tp, 1, bench.prefill_tp)
        groups = self._group("prefill", 0), self._group("decode", 1)
        call_all([*self._prefill, *self._decode], "link", *groups)
        self.path = self._path(make_link(*groups))
        """Path of the KV: `peer memory`, `staging` or `both`."""

    def _path(self, link: Link) -> str:
        if not self._bench.config.transport.peer_memory:
            return "staging"
        for rank, remote in enumerate(self._prefill):
            remote.start_call("wait_for_pools", len(link.destinations_of(rank)))
        written = [remote.answer() for remote in self._prefill]
        return "peer memory" if all(written) else "staging" if not any(written) else "both"

    def measure(self, case: TransferRound) -> tuple[float, ...]:
        """Returns the seconds from computed KV to landed KV: for each request if `in_flight` is 1, else per round."""
        pages = [case.pages(size, slots) for size, slots in zip(self._page_sizes, self._slots, strict=True)]
        call_all(self._prefill, "fill", pages[0], case.tokens)
        call_all(self._decode, "poison")
        found: list[float] = []
        for number in range(self._bench.repeats + 1):
            seconds = self._round(case, pages)
            call_all(self._decode, "check", pages[1], case.tokens)
            if number:  # the first round opens connections and maps memory
                found.extend(seconds)
        return tuple(found)

    def _round(self, case: TransferRound, pages: Sequence[Sequence[list[int]]]) -> list[float]:
        tickets = [self._ticket(case.tokens, row, owned) for row, owned in enumerate(pages[1])]
        everyone = (*self._prefill, *self._decode)
        receives = [m.OpenReceive(t, owned, "prefill") for t, owned in zip(tickets, pages[1], strict=True)]
        sends = [m.OpenSend(t.key, t, owned) for t, owned in zip(tickets, pages[0], strict=True)]
        call_all((self._prefill[0], self._decode[0]), "clear")
        call_all(self._decode, "open", receives)
        self._decode[0].call("wait", "RankOpened", len(tickets) * len(self._decode))
        call_all(self._prefill, "open", sends)
        keys = [ticket.key for ticket in tickets]
        batches = [keys] if case.in_flight > 1 else [[key] for key in keys]
        landed = itertools.accumulate(len(batch) for batch in batches)
        seconds = [self._move(case, batch, count) for batch, count in zip(batches, landed, strict=True)]
        call_all(everyone, "shut", [m.CloseTransfer(t.key, t.number, "measured") for t in tickets])
        for group in (self._prefill, self._decode):
            group[0].call("wait", "RankClosed", len(tickets) * len(group))
        return seconds

    def _move(self, case: TransferRound, keys: list[RequestKey], landed: int) -> float:
        start_at_s = time.monotonic() + COMPUTE_S
        self._decode[0].start_call("wait", "Landed", landed * len(self._decode))
        started_s = call_all(self._prefill, "send", keys, case.tokens, case.in_flight, case.ahead, start_at_s)
        landed_s: float = self._decode[0].answer()
        first_s: float = min(started_s)
        return landed_s - first_s

    def _ticket(self, tokens: int, row: int, pages: Sequence[int]) -> Ticket:
        number = next(self._tickets)
        return Ticket(RequestKey(f"bench-{number}"), number, "decode", Span(0, tokens), row, tuple(pages))

    def _group(self, role: str, side: int) -> GroupInfo:
        ranks = call_all(self._decode if side else self._prefill, "start")
        bench = self._bench
        return GroupInfo(
            name=role,
            role=role,
            protocol_version=PROTOCOL_VERSION,
            fingerprint="noise",
            layout=bench.layout,
            page_size=self._page_sizes[side],
            transport=transport_choice(bench.config).name,
            ranks=tuple(ranks),
            checksum=bool(bench.config.transfer.checksum),
        )
