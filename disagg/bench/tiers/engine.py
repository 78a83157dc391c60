"""One colocated rank in this process, with its router, whose prefix cache has the tiers to measure."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple

from disagg.colocated.rank import ColocatedRank
from disagg.core.config.read import ColocatedConfig, Config
from disagg.core.errors import DisaggError, InvariantError
from disagg.core.prefixes import PrefixKey, Tier, longest_held
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, SamplingParams
from disagg.kv.host_tier import HostTierStatistics
from disagg.kv.pages import pages_for
from disagg.model.runner import ModelRunner
from disagg.node.host_cache_sharing import HostCacheSharing
from disagg.node.kv_manager import KVManagerStatistics
from disagg.node.rank_start import RankModel
from disagg.node.renewed_exchange import PageEndpoint
from disagg.router.answers import SessionReport
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control.inproc import InprocControl, InprocHub
from transport.control.messages import MAX_MESSAGE_BYTES
from transport.control.reliable import ReliableOptions
from transport.inproc import InprocFabric, InprocTransport

REQUEST_TIMEOUT_S = 600.0
SETTLE_TIMEOUT_S = 60.0
MOST_USES = 200
"""Largest number of uses of a text, or of other prompts, until a prefix has entered or left a tier."""
_POLL_S = 0.002


class TimedAnswer(NamedTuple):
    """An answer with its times in seconds since the request was sent."""

    tokens: list[int]
    ttft_s: float
    ended_s: float
    token_s: Sequence[float] = ()
    """Time of each output; a step gives one token."""


def random_words(source: random.Random, count: int, vocabulary: int) -> list[int]:
    """Returns `count` random tokens."""
    return [source.randrange(vocabulary) for _ in range(count)]


class TierCounts(NamedTuple):
    """Tokens of prompts that came from each tier, since the engine's start."""

    device: int
    host: int
    """Tokens loaded from host memory, without those that were first fetched from the storage."""
    storage: int
    """Tokens fetched from the storage into host memory."""


class EnginePlace(NamedTuple):
    """Where an engine runs: alone, or beside another engine of this process."""

    hub: InprocHub
    """Control channel between the engines."""
    name: str = "colocated"
    pages: PageEndpoint | None = None
    """How the engine shares its host memory with the other engine; None if it shares none."""


class TiersEngine:
    """A colocated rank and its router. Made by `tiers_engine`; all methods run on one event loop."""

    def __init__(self, rank: ColocatedRank, router: Router) -> None:
        self.rank, self._router, self._numbers = rank, router, itertools.count(1)

    async def share_with(self, owner: TiersEngine) -> None:
        """Connects two engines that share host memory. Raises `DisaggError` after a time limit."""
        for engine in (self, owner):
            engine.rank.know_groups([self.rank.group, owner.rank.group])
        sharing = self.sharing
        await _until(lambda: sharing.statistics().peers == 1, "two groups were not connected")
        await self.learn_items(owner)

    async def learn_items(self, owner: TiersEngine) -> None:
        """Returns when this engine knows all items of another one. Raises `DisaggError` after a time limit."""
        served, index, address = owner.sharing.served, self.sharing.index, owner.rank.control.address
        assert served is not None, "set when the rank has joined its group"

        def known() -> bool:
            at = index.position(address)
            return (at.epoch, at.version, at.next_place) == (served.epoch, served.version, None)

        await _until(known, "KV events did not arrive")

    def published_tokens(self) -> int:
        """Returns how many tokens of KV were published for other groups, or stored, so far."""
        memory = self._memory()
        assert memory.host is not None, "the engine has a second tier"
        assert memory.host.storage is not None, "the engine has a third tier"
        return memory.host.storage.written_pages * memory.pages.page_size

    @property
    def sharing(self) -> HostCacheSharing:
        """The exchange with the other engine."""
        assert self.rank.sharing is not None, "the engine has an endpoint for pages"
        return self.rank.sharing

    async def generate(self, prompt: Sequence[int], max_tokens: int, salt: str = "") -> TimedAnswer:
        """Runs one greedy request to its end. Prompts of different salts share no cached KV."""
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        report, tokens, token_s = SessionReport(), list[int](), list[float]()
        began_s = time.perf_counter()
        async for output in self._router.generate(
            f"tiers-{next(self._numbers)}",
            prompt,
            sampling,
            timeout_s=REQUEST_TIMEOUT_S,
            report=report,
            cache_salt=salt,
        ):
            if output.tokens:
                token_s.append(time.perf_counter() - began_s)
            tokens += output.tokens
        return TimedAnswer(tokens, token_s[0], time.perf_counter() - began_s, token_s)

    def cached_tokens(self, prompt: Sequence[int], tier: Tier) -> int:
        """Returns how many leading tokens of `prompt` the tier has, by its KV events, in whole blocks."""
        assert self.rank.kv_manager is not None, "the only rank is rank 0"
        log = self.rank.kv_manager.kv_events.get(tier)
        if log is None:
            return 0
        key = PrefixKey.of(prompt, "", self.rank.runner.spec.rope_switch_tokens)
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
        await _until(lambda: not self._busy(), "copies between tiers did not end")

    def _busy(self) -> bool:
        memory = self._memory()
        return memory.free_rows < memory.rows or (memory.host is not None and _moves(memory.host))

    def _memory(self) -> KVManagerStatistics:
        assert self.rank.leader is not None, "the only rank is rank 0"
        return self.rank.leader.statistics().memory


async def use_until(
    engine: TiersEngine, text: Sequence[int], condition: Callable[[], bool], failure: str
) -> None:
    """Uses `text` until `condition` holds; each use copies a part of a long text to slower tiers.

    Raises `InvariantError` with the text `failure` if the condition never holds.
    """
    for _ in range(MOST_USES):
        await engine.generate(text, 1)
        await engine.settle()
        if condition():
            return
    raise InvariantError(failure)


async def _until(condition: Callable[[], bool], what: str) -> None:
    until_s = time.monotonic() + SETTLE_TIMEOUT_S
    while not condition():
        if time.monotonic() > until_s:
            raise DisaggError(f"{what} in {SETTLE_TIMEOUT_S:g} s")
        await asyncio.sleep(_POLL_S)


def _moves(host: HostTierStatistics) -> bool:
    storage = host.storage
    moving = host.storing_pages + host.loading_pages
    return bool(moving or (storage is not None and storage.writing_pages + storage.fetching_pages))


@asynccontextmanager
async def tiers_engine(
    config: Config,
    group: ColocatedConfig,
    model: RankModel,
    runner: ModelRunner,
    place: EnginePlace | None = None,
) -> AsyncIterator[TiersEngine]:
    """Yields a started engine; afterwards ends its threads. The cache is empty, the storage keeps its pages.

    Engines can use the same `runner` one after another. `place`: alone by default.
    """
    hub, name, pages = place or EnginePlace(InprocHub())
    fabric, options = InprocFabric(), ReliableOptions()
    rank = ColocatedRank(
        rank=0,
        config=config,
        group_config=group,
        name=name,
        runner=runner,
        control=InprocControl(hub, name, options, MAX_MESSAGE_BYTES),
        transport=InprocTransport(fabric, name),
    )
    if pages is not None:
        rank.share_host_cache(pages)
    try:
        info = GroupInfo(
            name,
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
        dispatcher = ResponseDispatcher(
            InprocControl(hub, f"router of {name}", options, MAX_MESSAGE_BYTES), loop
        )
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
