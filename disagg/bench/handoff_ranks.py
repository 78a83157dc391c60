"""Real ranks in processes of the benchmark, with clocks around their forward passes and a look at their KV."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, ClassVar, NamedTuple

import torch

from decode_node.rank import DecodeRank
from disagg.bench.noise import words
from disagg.core.ports import LayerHook
from disagg.core.types import RequestKey, SamplingParams, Shard, Span, code_row_bytes
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool, dtype_name
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.rounding import Judge, judge_by
from disagg.model.unsplit import forced_logits, generate_unsplit
from disagg.node.assemble import Rendezvous, make_source, resolve_dtype
from disagg.node.host import RankHost, Started
from disagg.node.plan import StepPlan
from disagg.node.rank import RankNode
from kernels.quantize import gather_codes_reference
from prefill_node.rank import PrefillRank
from transport import messages as m

cuda: Any = torch.cuda  # its events carry no types
Moment = Any
"""A CUDA event; on a CPU, `time.monotonic()` itself."""


class StepTime(NamedTuple):
    """One forward pass on one rank's device, from `begin_s` to `end_s` (`time.monotonic()`)."""

    begin_s: float
    kv_s: float
    """When the last layer had written its KV; `end_s` on a rank that does not look."""
    end_s: float
    requests: int


class DeviceClock:
    """Moments of the compute stream as `time.monotonic()` seconds. Between two `restart`s the device may drift by
    some parts in a million: restart before each measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: Moment = None
        self._zero_s = 0.0

    def restart(self) -> None:
        """Sets the two clocks by each other. Nothing must be running on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._zero = self.now()
            self._zero.synchronize()
            self._zero_s = time.monotonic()

    def now(self) -> Moment:
        """The moment at which the device will have done what the calling thread has queued so far."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))
        return event

    def seconds(self, moment: Moment) -> float:
        """`time.monotonic()` at the moment; waits until it has come."""
        if self._device.type != "cuda":
            return float(moment)
        moment.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


class TimedRank(RankNode[Any, Any]):
    """Notes when each forward pass began and ended on the device."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.computing = threading.Lock()
        """Held by a forward pass: a rank that follows ends its last one after its leader has answered."""
        self._device_clock = DeviceClock(self.runner.device)
        self._moments: list[tuple[Moment, Moment, Moment, int]] = []
        self._pages: dict[RequestKey, list[int]] = {}

    def restart(self) -> None:
        """Forgets what was noted. No request is under way."""
        with self.computing:
            self._moments.clear()
            self._pages.clear()
            self.timeline.drain()
            self._device_clock.restart()

    def step_times(self) -> list[StepTime]:
        """The forward passes since `restart`, in order. No request is under way."""
        at = self._device_clock.seconds
        with self.computing:
            return [StepTime(at(begin), at(kv), at(end), count) for begin, kv, end, count in self._moments]

    def on_message(self, peer: str, message: m.Message) -> None:
        """As `RankNode.on_message`; remembers where each request's KV lies."""
        if isinstance(message, m.OpenSend):
            self._pages[message.key] = message.pages
        elif isinstance(message, m.OpenReceive):
            self._pages[message.ticket.key] = message.pages
        super().on_message(peer, message)

    def kv_digests(self, key: RequestKey, tokens: int, dtype: str) -> dict[tuple[int, int], tuple[int, ...]]:
        """Of this rank's KV of positions `0 .. tokens`, for each (layer, head) of the model: each plane's digest.

        `dtype` is what decode ranks store: where this rank's pool has another, its KV is quantized to that before.

        For a request since `restart`, of which nothing has been overwritten: none came after it.
        """
        slots = slots_of(self._pages[key], self.runner.page_size, Span(0, tokens))
        slots = slots.long().to(self.runner.device)
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for pool, part in zip(self.runner.pool.parts, self.runner.shard.parts, strict=True):
            if dtype == dtype_name(pool.dtype):
                found |= digests(pool.buffer, slots, part)
            else:
                codes = as_codes(pool, slots, getattr(torch, dtype))
                found |= digests(codes, torch.arange(tokens, device=slots.device), part)
        return found

    def _forward(self, plan: StepPlan, on_layer: LayerHook | None = None) -> torch.Tensor:
        clock, written = self._device_clock, []
        layers: list[int] = []

        def noting(layer: int) -> None:
            assert on_layer is not None, "only passed on where there is a hook"
            layers.append(layer)
            if len(layers) == self.runner.pool.layers:
                written.append(clock.now())
            on_layer(layer)

        with self.computing:
            begin = clock.now()
            logits = super()._forward(plan, noting if on_layer else None)
            end = clock.now()
            self._moments.append((begin, written[0] if written else end, end, len(plan.work)))
        return logits


class TimedPrefillRank(TimedRank, PrefillRank):
    """See `TimedRank`."""


class TimedDecodeRank(TimedRank, DecodeRank):
    """See `TimedRank`."""


class TimedHost(RankHost):
    """What the benchmark asks of a rank, beside what a cluster does. No request is under way at any question."""

    def start(self, rendezvous: Rendezvous) -> Started:
        """As `RankHost.start`. On a CPU a rank has one thread, as under Ray: ranks share the cores."""
        if self.group_config.device == "cpu":
            torch.set_num_threads(1)
        return super().start(rendezvous)

    def restart(self) -> None:
        """A measurement begins."""
        self._timed().restart()

    def step_times(self) -> list[StepTime]:
        """Forward passes since `restart`."""
        return self._timed().step_times()

    def kv_digests(self, key: RequestKey, tokens: int, dtype: str) -> dict[tuple[int, int], tuple[int, ...]]:
        """See `TimedRank.kv_digests`."""
        return self._timed().kv_digests(key, tokens, dtype)

    def unsplit(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """The answer of this group's engine when it prefills and decodes itself, and the seconds it took.

        All ranks of the group together. Chunks are as long as those of a prefill step.
        """
        node = self._timed()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        chunk_tokens = self.group_config.chunk_tokens
        with node.computing, _own_rows(node.runner.req_to_token):
            started_s = time.monotonic()
            answers = generate_unsplit(node.runner, [prompt], sampling, chunk_tokens=chunk_tokens)
            return answers[0], time.monotonic() - started_s

    def judge(self, prompt: Sequence[int], answer: Sequence[int], asked: Sequence[int]) -> Judge:
        """What this group's engine makes of the last token of `answer`, behind those before it; `asked`: see `Judge`.

        All ranks of the group together.
        """
        node = self._timed()
        runner, chunk_tokens = node.runner, self.group_config.chunk_tokens
        dtype = resolve_dtype(self._config.model.dtype, make_source(self._config), runner.device)

        def last() -> Iterator[torch.Tensor]:
            steps = forced_logits(runner, prompt, answer, chunk_tokens=chunk_tokens)
            return islice(steps, len(answer) - 1, None)

        with node.computing, _own_rows(runner.req_to_token):
            return judge_by([runner.model], dtype, last, [asked])

    def close(self) -> None:
        """Ends threads and connections."""
        self.stop(0.0)

    def _timed(self) -> TimedRank:
        node = self._running()
        assert isinstance(node, TimedRank), "benchmark hosts make timed ranks"
        return node


class TimedPrefillHost(TimedHost):
    """A prefill rank."""

    node_class: ClassVar[type[RankNode[Any, Any]]] = TimedPrefillRank


class TimedDecodeHost(TimedHost):
    """A decode rank."""

    node_class: ClassVar[type[RankNode[Any, Any]]] = TimedDecodeRank


def as_codes(pool: MHATokenToKVPool, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What an unquantized pool has in `slots`, int64 `[tokens]`, as a pool of `dtype` would store it.

    uint8 `[layers, 1, tokens, heads, 2 * (head_dim + 2)]`; by torch, not by the kernel that is compared with it.
    """
    shape = (pool.layers, 1, len(slots), pool.heads, code_row_bytes(pool.head_dim))
    found = torch.empty(shape, dtype=torch.uint8, device=slots.device)
    for layer in range(pool.layers):  # one at a time: in float32 it is twice as large
        one = Span(layer, layer + 1)
        gather_codes_reference(pool.buffer, slots, one, Span(0, pool.heads), dtype, found[layer].view(-1))
    return found


def digests(pool: torch.Tensor, slots: torch.Tensor, shard: Shard) -> dict[tuple[int, int], tuple[int, ...]]:
    """For each global (layer, head) of `shard`, each plane's digest over `slots`, int64 `[tokens]`, in their order.

    `pool`: `[layers, planes, slots, heads, head_dim]`. One byte that differs always gives another digest, any
    other difference but for a negligible chance.
    """
    head_bytes = pool.shape[-1] * pool.element_size()
    weights = (words(len(slots) * head_bytes, pool.device) | 1).view(len(slots), 1, head_bytes)
    # A layer at a time: as int64 it is eight times as large.
    sums = [(layer[:, slots].view(torch.uint8) * weights).sum(dim=(1, 3)).tolist() for layer in pool]
    return {
        (layer, head): tuple(of_planes)
        for layer, planes in zip(shard.layers, sums, strict=True)
        for head, *of_planes in zip(shard.heads, *planes, strict=True)
    }


@contextmanager
def _own_rows(table: ReqToTokenPool) -> Iterator[None]:
    """Rows for another engine on the same table: the leader, which holds all of them, uses none now."""
    for row in range(table.rows):
        table.free(row)
    try:
        yield
    finally:
        for _ in range(table.rows):
            table.alloc()
