"""One colocated rank in this process, with its router, whose prefix cache has the tiers to measure."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from disagg.colocated.rank import ColocatedRank
from disagg.core.config.read import ColocatedConfig, Config
from disagg.core.errors import DisaggError
from disagg.core.prefixes import PrefixKey, Tier, longest_held
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, SamplingParams
from disagg.kv.host_tier import HostTierStatistics
from disagg.kv.pages import pages_for
from disagg.model.runner import ModelRunner
from disagg.node.kv_manager import KVManagerStatistics
from disagg.node.rank_start import RankModel
from disagg.router.answers import SessionReport
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control.inproc import InprocControl, InprocHub
from transport.control.messages import MAX_MESSAGE_BYTES
from transport.control.reliable import ReliableOptions
from transport.inproc import InprocFabric, InprocTransport

REQUEST_TIMEOUT_S = 600.0
SETTLE_TIMEOUT_S = 60.0
_POLL_S = 0.002
_NAME = "colocated"


class TimedAnswer(NamedTuple):
    """An answer with its times in seconds since the request was sent."""

    tokens: list[int]
    ttft_s: float
    ended_s: float


class TierCounts(NamedTuple):
    """Tokens of prompts that came from each tier, since the engine's start."""

    device: int
    host: int
    """Tokens loaded from host memory, without those that were first fetched from the storage."""
    storage: int
    """Tokens fetched from the storage into host memory."""


class TiersEngine:
    """A colocated rank and its router. Made by `tiers_engine`; all methods run on one event loop."""

    def __init__(self, rank: ColocatedRank, router: Router) -> None:
        self._rank, self._router, self._numbers = rank, router, itertools.count(1)

    async def generate(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> TimedAnswer:
        """Runs one greedy request to its end. Prompts of different salts share no cached KV."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        report, tokens = SessionReport(), list[int]()
        began_s = time.perf_counter()
        ttft_s = 0.0
        async for output in self._router.generate(
            f"tiers-{next(self._numbers)}",
            prompt,
            sampling,
            timeout_s=REQUEST_TIMEOUT_S,
            report=report,
            cache_salt=salt,
        ):
            ttft_s = ttft_s or time.perf_counter() - began_s
            tokens += output.tokens
        return TimedAnswer(tokens, ttft_s, time.perf_counter() - began_s)

    def cached_tokens(self, prompt: Sequence[int], tier: Tier) -> int:
        """Returns how many leading tokens of `prompt` the tier has, by its KV events, in whole blocks."""
        assert self._rank.kv_manager is not None, "the only rank is rank 0"
        log = self._rank.kv_manager.kv_events.get(tier)
        if log is None:
            return 0
        key = PrefixKey.of(prompt, "", self._rank.runner.spec.rope_switch_tokens)
        return log.unit_tokens * longest_held(key.block_hashes(log.unit_tokens), log.held)

    def counts(self) -> TierCounts:
        """Returns the tokens that came from each tier so far."""
        memory = self._memory()
        host = memory.host
        page = memory.pages.page_size
        fetched = host.storage.fetched_pages if host is not None and host.storage is not None else 0
        loaded = host.loaded_pages if host is not None else 0
        device = memory.cache.hit_tokens if memory.cache is not None else 0
        return TierCounts(device, max(0, loaded - fetched) * page, fetched * page)

    async def settle(self) -> None:
        """Returns when no request is running and no tier copies pages. Raises `DisaggError` after a time limit."""
        until_s = time.monotonic() + SETTLE_TIMEOUT_S
        while self._busy():
            if time.monotonic() > until_s:
                raise DisaggError(
                    f"copies between tiers did not end in {SETTLE_TIMEOUT_S:g} s: {self._memory()}"
                )
            await asyncio.sleep(_POLL_S)

    def _busy(self) -> bool:
        memory = self._memory()
        return memory.free_rows < memory.rows or (memory.host is not None and _moves(memory.host))

    def _memory(self) -> KVManagerStatistics:
        assert self._rank.leader is not None, "the only rank is rank 0"
        return self._rank.leader.statistics().memory


def _moves(host: HostTierStatistics) -> bool:
    storage = host.storage
    moving = host.storing_pages + host.loading_pages
    return bool(moving or (storage is not None and storage.writing_pages + storage.fetching_pages))


@asynccontextmanager
async def tiers_engine(
    config: Config, group: ColocatedConfig, model: RankModel, runner: ModelRunner
) -> AsyncIterator[TiersEngine]:
    """Yields a started engine; afterwards ends its threads. The cache is empty, the storage keeps its pages.

    Engines can use the same `runner` one after another.
    """
    hub, fabric, options = InprocHub(), InprocFabric(), ReliableOptions()
    rank = ColocatedRank(
        rank=0,
        config=config,
        group_config=group,
        name=_NAME,
        runner=runner,
        control=InprocControl(hub, _NAME, options, MAX_MESSAGE_BYTES),
        transport=InprocTransport(fabric, _NAME),
    )
    try:
        info = GroupInfo(
            _NAME,
            "colocated",
            PROTOCOL_VERSION,
            model.fingerprint.result(),
            runner.spec.layout,
            group.page_size,
            "inproc",
            (rank.start(),),
        )
        rank.join(info)
        loop = asyncio.get_running_loop()
        dispatcher = ResponseDispatcher(InprocControl(hub, "router", options, MAX_MESSAGE_BYTES), loop)
        dispatcher.start()
        try:
            engine = TiersEngine(rank, Router(dispatcher, (info,)))
            yield engine
            await engine.settle()
            rank.check()
        finally:
            dispatcher.close()
    finally:
        rank.stop()
        for row in range(runner.req_to_token.rows):  # a rank takes all rows of its runner
            runner.req_to_token.free(row)


def whole_pages(tokens: int, page_size: int) -> int:
    """Returns `tokens` rounded up to whole pages."""
    return pages_for(tokens, page_size) * page_size
