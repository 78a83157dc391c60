"""The router: its groups, the choice of a pair for each request, and retries on other groups."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing

import structlog

from disagg.core.clock import Clock
from disagg.core.errors import ChecksumError, InvalidRequestError, PeerLostError
from disagg.core.prefixes import PrefixKey
from disagg.core.sampling import MAX_SEQUENCES, check_sampling, sequences_that_fit
from disagg.core.status import GroupStatus
from disagg.core.tokens import TokenIds, pack_tokens
from disagg.core.types import GroupInfo, RequestKey, SamplingParams
from disagg.router.policy import Policy, RoutedGroup, RoutingRequest, SessionLoad, prefix_aware
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.session import Output, Session, SessionReport
from disagg.router.session_driver import SessionDriver
from disagg.router.status import GroupStatuses
from disagg.router.text import Decode

log = structlog.get_logger(__name__)

TRIES = 3
"""Attempts per request, each on other groups."""
SHUNNED_S = 5.0
"""Time for which a pair with a failed transfer is avoided if another pair exists."""


class Router:
    """Routes requests to groups and runs their sessions. Used on one event loop."""

    def __init__(
        self,
        dispatcher: ResponseDispatcher,
        groups: Iterable[GroupInfo] = (),
        *,
        reserve_retry_s: float = 0.05,
        choose: Policy = prefix_aware,
        clock: Clock = time.monotonic,
    ) -> None:
        """`clock` runs as the event loop's; it may be finer than the `time()` of that loop."""
        self._dispatcher, self._reserve_retry_s, self._choose = dispatcher, reserve_retry_s, choose
        self._clock = clock
        self._engines: dict[str, RoutedGroup] = {}
        self._shunned: dict[tuple[str, str], float] = {}
        """Avoided pairs of a prefill and a decode group, with the end of the avoidance."""
        self.statuses = GroupStatuses(dispatcher, self._living, self._compares)
        """Statuses of the groups, updated within `disagg.router.status.watching`."""
        self._roles: tuple[str, ...] = ("prefill", "decode")
        """Roles of the groups that each request needs."""
        for group in groups:
            self.add(group)

    @property
    def engines(self) -> tuple[RoutedGroup, ...]:
        """All groups with their load."""
        return tuple(self._engines.values())

    def add(self, group: GroupInfo) -> None:
        """Adds a group; no effect if the group is known.

        A group of the same name with another leader replaces a dead one. Either all groups of a cluster are colocated
        or none.
        """
        self._roles = ("colocated",) if group.role == "colocated" else ("prefill", "decode")
        known = self._engines.get(group.name)
        if known is None or known.group.leader.control_address != group.leader.control_address:
            self._engines[group.name] = RoutedGroup(group)
            self._dispatcher.revive(rank.control_address for rank in group.ranks)
            self._dispatcher.watch(group.leader.control_address)

    async def drain(self, name: str) -> None:
        """Stops new requests to the group, waits for its running ones, then removes the group."""
        engine = self._engines.get(name)
        if engine is None:
            return
        engine.draining = True
        while engine.requests and not self._lost(engine):
            await asyncio.sleep(self._reserve_retry_s)
        if self._engines.get(name) is engine:
            del self._engines[name]
            self._dispatcher.forget(engine.group.leader.control_address)

    def remove(self, name: str) -> None:
        """Removes a dead group and ends its requests; no effect on an unknown name."""
        engine = self._engines.pop(name, None)
        for rank in engine.group.ranks if engine is not None else ():
            self._dispatcher.lose(rank.control_address)

    def _living(self) -> list[RoutedGroup]:
        return [engine for engine in self._engines.values() if not self._lost(engine)]

    def _of(self, role: str) -> list[RoutedGroup]:
        engines = [engine for engine in self._engines.values() if engine.group.role == role]
        for engine in engines:
            engine.lost = self._lost(engine) or self.statuses.broken(engine)
        return engines

    def _lost(self, engine: RoutedGroup) -> bool:
        return not self._dispatcher.lost.isdisjoint(rank.control_address for rank in engine.group.ranks)

    def groups(self) -> tuple[GroupStatus, ...]:
        """Returns the latest status of each living group, prefill groups first, then by name."""
        return self.statuses.latest()

    def draining(self) -> tuple[str, ...]:
        """Returns the names of draining groups."""
        return tuple(engine.group.name for engine in self._engines.values() if engine.draining)

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        """Returns the number of answers or beams of such a request that every living group can compute together."""
        living = [e.group for e in self._of(self._roles[-1]) if not e.lost]
        most = [
            min(
                group.leader.max_sequences,
                sequences_that_fit(prompt_tokens, max_tokens, group.leader.pool_tokens, group.page_size),
            )
            for group in living
        ]
        return min(most, default=MAX_SEQUENCES)

    def missing(self) -> list[str]:
        """Returns the roles without a usable group; empty if requests can be served."""
        usable = {
            e.group.role for role in self._roles for e in self._of(role) if not e.lost and not e.draining
        }
        return sorted(set(self._roles) - usable)

    def _compares(self, engine: RoutedGroup) -> bool:
        """Returns whether the policy compares cached prefixes of this group: several groups, prefix-aware policy."""
        kinds = Counter(e.group.role for e in self._engines.values())
        return self._choose is prefix_aware and kinds[engine.group.role] > 1

    def _routing_request(self, prompt: TokenIds, cache_salt: str, session: str) -> RoutingRequest:
        """Returns the request's properties for the policy; hashes the prompt only if a compared group caches
        prefixes."""
        helds = [e.held for e in self._engines.values() if len(e.held) and self._compares(e)]
        block_hashes = {
            (unit, switch): PrefixKey.of(prompt, cache_salt, switch).block_hashes(unit)
            for unit, switch in {(held.unit_tokens, held.switch_tokens) for held in helds}
        }
        return RoutingRequest(len(prompt), session, block_hashes)

    def _pair(self, request: RoutingRequest) -> tuple[RoutedGroup, RoutedGroup]:
        """Returns the prefill and the decode group, the same one if colocated."""
        if len(self._roles) == 1:
            both = self._choose(self._of(self._roles[0]), request)
            return both, both
        prefills, decodes = (self._of(role) for role in self._roles)
        met = [one for one in prefills if any(self._meet(one, other) for other in decodes)]
        prefill = self._choose(met or prefills, request)
        met = [other for other in decodes if self._meet(prefill, other)]
        return prefill, self._choose(met or decodes, request)

    def _meet(self, prefill: RoutedGroup, decode: RoutedGroup) -> bool:
        """Returns whether both groups are usable and the pair is not avoided."""
        alive = not any(one.lost or one.draining for one in (prefill, decode))
        return alive and self._shunned.get(_names(prefill, decode), 0.0) <= self._clock()

    def _shun(self, prefill: RoutedGroup, decode: RoutedGroup) -> None:
        """Avoids a pair after a failed transfer: each group may work, the network between them may not."""
        now_s = self._clock()
        self._shunned = {pair: until_s for pair, until_s in self._shunned.items() if until_s > now_s}
        self._shunned[_names(prefill, decode)] = now_s + SHUNNED_S

    async def generate(
        self,
        request_id: str,
        prompt: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_s: float,
        decode: Decode | None = None,
        report: SessionReport | None = None,
        cache_salt: str = "",
        session: str = "",
    ) -> AsyncGenerator[Output, None]:
        """Streams the answers to `prompt`; an early `aclose` aborts the request in both groups.

        `decode` converts tokens to text and is needed for stop strings; `disagg.router.text.decode_with` makes one.
        Only prompts with the same `cache_salt` share cached KV. Requests with the same `session` use the same decode
        group, unless it is overloaded.

        A request that loses a group, or whose KV arrives damaged twice, is repeated on other groups if no output has
        been returned.

        Raises `InvalidRequestError`, `RequestInUseError`, `BusyError`, `PromptTooLongError`, `RequestTimeoutError`,
        `PeerLostError`, or another `DisaggError`.
        """
        check_sampling(sampling)  # the leaders check again, with the vocabulary
        tokens, deadline_s = _packed(prompt), self._clock() + timeout_s
        request = self._routing_request(tokens, cache_salt, session)
        for epoch in range(TRIES):
            pair, answered = self._pair(request), False
            run = Session(
                pair[0].group,
                pair[1].group,
                RequestKey(request_id, epoch),
                tokens,
                sampling,
                deadline_s,
                decode,
                report or SessionReport(),
                self._reserve_retry_s,
                cache_salt,
                self._dispatcher.lost,
            )
            load = SessionLoad(
                *pair, sampling.sequences, {engine: request.missing_tokens(engine) for engine in pair}
            )
            try:
                async with aclosing(SessionDriver(self._dispatcher, run, load, self._clock).run()) as outputs:
                    async for output in outputs:
                        answered = True
                        yield output
                return
            except (PeerLostError, ChecksumError) as error:
                self._shun(*pair)
                if answered or epoch + 1 == TRIES or not self._has_others(pair):
                    raise
                log.info("tried_elsewhere", request=request_id, not_with=_names(*pair), error=str(error))

    def _has_others(self, pair: tuple[RoutedGroup, RoutedGroup]) -> bool:
        """Returns whether another usable pair exists."""
        if len(self._roles) == 1:
            return any(not e.lost and not e.draining for e in self._of(self._roles[0]) if e is not pair[0])
        prefills, decodes = (self._of(role) for role in self._roles)
        return any(self._meet(one, other) for one in prefills for other in decodes)


def _packed(prompt: Sequence[int]) -> TokenIds:
    try:
        return pack_tokens(prompt)
    except ValueError as exc:
        raise InvalidRequestError(f"the prompt cannot be served: {exc}", param="prompt") from exc


def _names(prefill: RoutedGroup, decode: RoutedGroup) -> tuple[str, str]:
    return prefill.group.name, decode.group.name
