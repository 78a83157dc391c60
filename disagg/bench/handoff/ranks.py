"""Real ranks in benchmark processes, with timed forward passes and digests of their KV."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

import torch

from decode_node.rank import DecodeRank
from disagg.bench.common.noise import words
from disagg.core.ports import LayerHook
from disagg.core.types import RequestKey, SamplingParams, Shard, Span, dtype_name, quantized_row_bytes
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.load.source import make_source
from disagg.model.rounding import Judge, judge_by
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.unsplit import forced_logits, generate_unsplit
from disagg.node.assemble import resolve_dtype
from disagg.node.host import RankHost
from disagg.node.loaded_layers import LayerWaits
from disagg.node.plan import StepPlan
from disagg.node.rank import RankNode
from disagg.node.rank_records import Rendezvous, Started
from kernels.copy.quantize import gather_quantized_reference
from prefill_node.rank import PrefillRank
from transport.control import messages as m

cuda: Any = torch.cuda  # events of torch.cuda are untyped
Moment = Any
"""A point in time of the compute stream: a CUDA event; on a CPU, a `time.monotonic()` value."""


class StepTime(NamedTuple):
    """One forward pass on one rank's device, from `begin_s` to `end_s` (`time.monotonic()`)."""

    begin_s: float
    kv_s: float
    """Time at which the last layer had written its KV; equal to `end_s` on a rank that does not record this time."""
    end_s: float
    requests: int


class DeviceClock:
    """Converts moments of the compute stream to `time.monotonic()` seconds.

    After `restart`, the device's clock may drift by some parts in a million, so call `restart` before each
    measurement.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero: Moment = None
        self._zero_s = 0.0

    def restart(self) -> None:
        """Synchronizes the two clocks. No work may be running on the device."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            self._zero = self.now()
            self._zero.synchronize()
            self._zero_s = time.monotonic()

    def now(self) -> Moment:
        """Returns the moment at which the device completes the calling thread's queued work."""
        if self._device.type != "cuda":
            return time.monotonic()
        event = cuda.Event(enable_timing=True)
        event.record(cuda.current_stream(self._device))
        return event

    def seconds(self, moment: Moment) -> float:
        """Returns `time.monotonic()` at the moment; blocks until the moment has passed."""
        if self._device.type != "cuda":
            return float(moment)
        moment.synchronize()
        return self._zero_s + float(self._zero.elapsed_time(moment)) / 1e3


class TimedRank(RankNode[Any, Any, Any]):
    """Records the start and the end of each forward pass on the device."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.computing = threading.Lock()
        """Lock that is held during a forward pass: a follower may finish its last pass after its leader has
        replied."""
        self._device_clock = DeviceClock(self.runner.device)
        self._moments: list[tuple[Moment, Moment, Moment, int]] = []
        self._pages: dict[RequestKey, list[int]] = {}

    def restart(self) -> None:
        """Drops the records. No request may be running."""
        with self.computing:
            self._moments.clear()
            self._pages.clear()
            self.timeline.drain()
            self._device_clock.restart()

    def step_times(self) -> list[StepTime]:
        """Returns the forward passes since `restart`, in order. No request may be running."""
        at = self._device_clock.seconds
        with self.computing:
            return [StepTime(at(begin), at(kv), at(end), count) for begin, kv, end, count in self._moments]

    def on_message(self, peer: str, message: m.Message) -> None:
        """Records the pages of each request, then calls `RankNode.on_message`."""
        if isinstance(message, m.OpenSend):
            self._pages[message.key] = message.pages
        elif isinstance(message, m.OpenReceive):
            self._pages[message.ticket.key] = message.pages
        super().on_message(peer, message)

    def pages_of(self, key: RequestKey) -> list[int]:
        """Returns the pages of a request that ran since `restart`. Raises `KeyError` for any other request."""
        return self._pages[key]

    def kv_digests(self, key: RequestKey, tokens: int, dtype: str) -> dict[tuple[int, int], tuple[int, ...]]:
        """Returns digests of this rank's KV of positions `0 .. tokens`: one per plane, for each (layer, head)
        of the model.

        `dtype` is the decode ranks' KV type; KV of another type is first quantized to `dtype`. The request must have
        run since `restart`, and no later request may have overwritten its KV.
        """
        slots = slots_of(self.pages_of(key), self.runner.page_size, Span(0, tokens))
        slots = slots.long().to(self.runner.device)
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for pool, part in zip(self.runner.pool.parts, self.runner.shard.parts, strict=True):
            if dtype == dtype_name(pool.dtype):
                found |= digests(pool.buffer, slots, part)
            else:
                quantized = as_quantized(pool, slots, getattr(torch, dtype))
                found |= digests(quantized, torch.arange(tokens, device=slots.device), part)
        return found

    def _forward(
        self,
        plan: StepPlan,
        on_layer: LayerHook | None = None,
        scores: PromptScores | None = None,
        loaded: LayerWaits | None = None,
    ) -> torch.Tensor:
        clock, written = self._device_clock, []
        layers: list[int] = []

        def noting(layer: int) -> None:
            assert on_layer is not None, "_forward passes it only with a hook"
            layers.append(layer)
            if len(layers) == self.runner.pool.layers:
                written.append(clock.now())
            on_layer(layer)

        with self.computing:
            begin = clock.now()
            logits = super()._forward(plan, noting if on_layer else None, scores, loaded)
            end = clock.now()
            self._moments.append((begin, written[0] if written else end, end, len(plan.work)))
        return logits


class TimedPrefillRank(TimedRank, PrefillRank):
    """A prefill rank with the records of `TimedRank`."""


class TimedDecodeRank(TimedRank, DecodeRank):
    """A decode rank with the records of `TimedRank`."""


class TimedHost(RankHost):
    """Adds the benchmark's calls to a rank's host. No request may be running during a call."""

    def start(self, rendezvous: Rendezvous) -> Started:
        """Starts the rank. On a CPU, a rank uses one thread, as under Ray, because ranks share the cores."""
        if self.group_config.device == "cpu":
            torch.set_num_threads(1)
        return super().start(rendezvous)

    def restart(self) -> None:
        """Drops the rank's records and starts a new measurement."""
        self._timed().restart()

    def step_times(self) -> list[StepTime]:
        """Returns the rank's forward passes since `restart`, in order."""
        return self._timed().step_times()

    def kv_digests(self, key: RequestKey, tokens: int, dtype: str) -> dict[tuple[int, int], tuple[int, ...]]:
        """Returns digests of the rank's KV; see `TimedRank.kv_digests`."""
        return self._timed().kv_digests(key, tokens, dtype)

    def unsplit(self, prompt: Sequence[int], max_tokens: int) -> tuple[list[int], float]:
        """Generates an answer with this group's engine alone; returns the answer and the seconds taken.

        All ranks of the group must be called together. Prompt chunks are as long as in the group's prefill steps.
        """
        node = self._timed()
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        chunk_tokens = self.group_config.chunk_tokens
        with node.computing, _own_rows(node.runner.req_to_token):
            started_s = time.monotonic()
            answers = generate_unsplit(node.runner, [prompt], sampling, chunk_tokens=chunk_tokens)
            return answers[0], time.monotonic() - started_s

    def judge(self, prompt: Sequence[int], answer: Sequence[int], candidates: Sequence[int]) -> Judge:
        """Returns this group's log-probabilities of `candidates` in place of the last token of `answer`.

        All ranks of the group must be called together.
        """
        node = self._timed()
        runner, chunk_tokens = node.runner, self.group_config.chunk_tokens
        dtype = resolve_dtype(self._config.model.dtype, make_source(self._config), runner.device)

        def last() -> Iterator[torch.Tensor]:
            steps = forced_logits(runner, prompt, answer, chunk_tokens=chunk_tokens)
            return islice(steps, len(answer) - 1, None)

        with node.computing, _own_rows(runner.req_to_token):
            return judge_by([runner.model], dtype, last, [candidates])

    def close(self) -> None:
        """Ends threads and connections."""
        self.stop(0.0)

    def _timed(self) -> TimedRank:
        node = self._running()
        assert isinstance(node, TimedRank), "benchmark hosts make timed ranks"
        return node


class TimedPrefillHost(TimedHost):
    """The host of a `TimedPrefillRank`."""

    role = "prefill"

    @staticmethod
    def rank_class() -> type[TimedPrefillRank]:
        """Returns `TimedPrefillRank`."""
        return TimedPrefillRank


class TimedDecodeHost(TimedHost):
    """The host of a `TimedDecodeRank`."""

    role = "decode"

    @staticmethod
    def rank_class() -> type[TimedDecodeRank]:
        """Returns `TimedDecodeRank`."""
        return TimedDecodeRank


def as_quantized(pool: MHATokenToKVPool, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Returns an unquantized pool's KV in `slots`, int64 `[tokens]`, as stored in a pool of `dtype`.

    The result is uint8 `[layers, 1, tokens, heads, 2 * (head_dim + 2)]`, and is computed by torch, independently of
    the tested kernel.
    """
    shape = (pool.layers, 1, len(slots), pool.heads, quantized_row_bytes(pool.head_dim))
    found = torch.empty(shape, dtype=torch.uint8, device=slots.device)
    for layer in range(pool.layers):  # one layer at a time: the reference works in float32
        one = Span(layer, layer + 1)
        gather_quantized_reference(pool.buffer, slots, one, Span(0, pool.heads), dtype, found[layer].view(-1))
    return found


def digests(pool: torch.Tensor, slots: torch.Tensor, shard: Shard) -> dict[tuple[int, int], tuple[int, ...]]:
    """Returns the digest of each plane over `slots`, int64 `[tokens]`, in order, for each global (layer,
    head) of `shard`.

    `pool`: `[layers, planes, slots, heads, head_dim]`. A single differing byte always changes the digest;
    other differences do so except with negligible probability.
    """
    head_bytes = pool.shape[-1] * pool.element_size()
    weights = (words(len(slots) * head_bytes, pool.device) | 1).view(len(slots), 1, head_bytes)
    # One layer at a time: int64 products take eight times the memory of the layer's bytes.
    sums = [(layer[:, slots].view(torch.uint8) * weights).sum(dim=(1, 3)).tolist() for layer in pool]
    return {
        (layer, head): tuple(of_planes)
        for layer, planes in zip(shard.layers, sums, strict=True)
        for head, *of_planes in zip(shard.heads, *planes, strict=True)
    }


@contextmanager
def _own_rows(table: ReqToTokenPool) -> Iterator[None]:
    """Frees all rows of the leader's table for another engine within the block; no request may use a row."""
    for row in range(table.rows):
        table.free(row)
    try:
        yield
    finally:
        for _ in range(table.rows):
            table.alloc()
