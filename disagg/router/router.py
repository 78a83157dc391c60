"""The `Router`: chooses the groups of each session, runs requests on them, and counts recoveries."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence, Set
from functools import partial

from disagg.core.clock import Clock
from disagg.core.config.read import RouterConfig
from disagg.core.errors import BusyError, InvalidRequestError
from disagg.core.local_prefill import computes_locally
from disagg.core.prefixes import PrefixKey
from disagg.core.profile.types import ProfileRequest, TraceSummary
from disagg.core.sampling import MAX_SEQUENCES, check_sampling, sequences_that_fit
from disagg.core.status import GroupStatus
from disagg.core.tokens import TokenIds, pack_tokens
from disagg.core.types import GroupInfo, SamplingParams
from disagg.router.answers import Emit, Output, RouterRequest, SessionReport, new_answers
from disagg.router.group_table import GroupTable, has_rank_in
from disagg.router.policy import (
    POLICIES,
    LocalPrefill,
    RoutedGroup,
    RoutingRequest,
    SplitPrompts,
    computing_prompts,
    least_loaded,
    prefix_aware,
)
from disagg.router.profiling import record_profile
from disagg.router.prompt_moves import PromptMoves
from disagg.router.recovery import Branch, RecoveryBudget
from disagg.router.request_run import Pair, RecoveryOptions, RequestRun, RoutedRequest, RunContext
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.session_driver import to_its_end
from disagg.router.session_events import Loss
from disagg.router.status import GroupStatuses
from disagg.router.suspicion import Suspicions
from disagg.router.text import Decode

DEFAULTS = RouterConfig()
UNDIVIDED_S, MOST_UNDIVIDED_S = 60.0, 3600.0
"""Time for which no prompt is divided after the first failed attempt with a divided prompt, and its upper bound: each
further failure doubles the time, because a wire may always be too slow."""
SHUNNED_S = 5.0
"""Seconds for which the router avoids a (prefill, decode) pair after a failed transfer, if another pair exists."""
DRAIN_PAUSE_S = 0.05
"""Seconds between two checks whether a draining group still has requests."""

GroupsChanged = Callable[[Sequence[GroupInfo]], None]
"""Callback that receives the groups that accept new requests, after each change of these groups."""


class Router:
    """Routes requests to groups and runs their sessions. All methods run on one event loop."""

    def __init__(
        self,
        dispatcher: ResponseDispatcher,
        groups: Iterable[GroupInfo] = (),
        *,
        config: RouterConfig = DEFAULTS,
        clock: Clock = time.monotonic,
    ) -> None:
        """`clock` has the event loop's rate and epoch, but may have a finer resolution."""
        self._dispatcher, self.choose = dispatcher, POLICIES[config.policy]
        self._clock = clock
        self._load_costs = config.host_load_cost, config.storage_load_cost
        self._local = LocalPrefill(config.local_prefill_queue_tokens, config.local_prefill_cost)
        self._split = SplitPrompts(config.split_prompt_tokens)
        self._undivided_s = UNDIVIDED_S
        self._undivided_until_s = -math.inf
        """Time until which no prompt is divided, because an attempt with a divided prompt has failed."""
        self.local_prefills: Counter[str] = Counter()
        """Sessions whose prompts were assigned to decode groups, since the start, by reason: `queue` if a prefill
        group would take longer, `no_prefill_group` if none is usable, `cached` if the decode group has cached
        nearly all, `split` if a prefill group computes the beginning."""
        divides = config.split_prompt_tokens > 0
        self._table = GroupTable(dispatcher, lambda: self.choose is prefix_aware, divides=divides)
        self._suspicions = Suspicions(dispatcher, self._table)
        self._moves = PromptMoves(self._local, self._reachable_prefills, dispatcher.call_soon)
        dispatcher.on_change = self._table.statuses.on_change = self._review
        budget = RecoveryBudget(config.recoveries_per_s, clock)
        options = RecoveryOptions(config.reserve_wait_s, config.max_recoveries, config.group_wait_s)
        self._context = RunContext(
            dispatcher,
            options,
            budget,
            clock,
            self._recovered,
            self._shun,
            self._dead_groups,
            self._silent_groups,
            self._decode_groups,
            self._suspicions.leaders,
            self._moves,
            self._stop_dividing,
        )
        self._missing_since_s: dict[str, float] = {}
        """Clock time at which each role was first seen without a usable group."""
        self.recoveries: Counter[str] = Counter()
        """Recoveries of requests since the start, by `Loss`."""
        self._shunned: dict[tuple[str, str], float] = {}
        """Clock time until which each (prefill, decode) pair is avoided."""
        self._roles: tuple[str, ...] = ("prefill", "decode")
        """Roles of the groups that each request needs."""
        self._changed: GroupsChanged = lambda groups: None
        for group in groups:
            self.add(group)

    @property
    def engines(self) -> tuple[RoutedGroup, ...]:
        """All groups with their load."""
        return self._table.engines

    @property
    def suspicions(self) -> Counter[str]:
        """How often each group was suspected since the start, by the group's name."""
        return self._suspicions.counts

    @property
    def moved_prompts(self) -> Counter[str]:
        """How many prompts left a decode group for a prefill group since the start; the only key is `sooner`."""
        return self._moves.counts

    @property
    def statuses(self) -> GroupStatuses:
        """Latest statuses of the groups; updated only within the context `disagg.router.status.watching`."""
        return self._table.statuses

    def _review(self) -> None:
        """Handles a change of the groups."""
        self._suspicions.review()
        self._moves.review_soon()

    def on_groups_changed(self, changed: GroupsChanged) -> None:
        """Calls `changed` with the groups that accept new requests, now and after every change of these groups."""
        self._changed = changed
        self._report_groups()

    def _report_groups(self) -> None:
        self._changed([engine.group for engine in self.engines if not engine.draining])

    def add(self, group: GroupInfo) -> None:
        """Adds a group; no effect if the group is known.

        A known name with another leader address replaces the old group, which is dead. Either all groups of a cluster
        are colocated or none.
        """
        self._roles = ("colocated",) if group.role == "colocated" else ("prefill", "decode")
        if self._table.add(group):
            self._dispatcher.revive(rank.control_address for rank in group.ranks)
            self._dispatcher.watch(group.leader.control_address)
            self._report_groups()

    async def drain(self, name: str) -> None:
        """Stops new requests to the group, waits for running requests, then removes the group.

        A cancelled drain leaves the group in use.
        """
        engine = self._table.get(name)
        if engine is None:
            return
        self._table.set_draining(engine, True)
        self._report_groups()
        try:
            while engine.requests and not self._table.has_lost_rank(engine):
                await asyncio.sleep(DRAIN_PAUSE_S)
        except asyncio.CancelledError:
            self._table.set_draining(engine, False)
            self._report_groups()
            raise
        if self._table.get(name) is engine:
            self._table.pop(name)
            self._dispatcher.forget(engine.group.leader.control_address)

    def remove(self, name: str) -> None:
        """Removes a dead group and ends its requests; no effect on an unknown name."""
        engine = self._table.pop(name)
        for rank in engine.group.ranks if engine is not None else ():
            self._dispatcher.lose(rank.control_address)
        self._report_groups()

    def groups(self) -> tuple[GroupStatus, ...]:
        """Returns the latest status of each living group, prefill groups first, then by name."""
        return self.statuses.latest()

    def draining(self) -> tuple[str, ...]:
        """Returns the names of draining groups."""
        return tuple(engine.group.name for engine in self.engines if engine.draining)

    def suspected(self) -> tuple[str, ...]:
        """Returns the names of groups that are silent but not lost."""
        return self._suspicions.names

    def max_sequences(self, prompt_tokens: int, max_tokens: int) -> int:
        """Returns how many answers or beams one request of these lengths may have: as many as every living decode
        group can compute at once."""
        most = (
            min(limit.max_sequences, sequences_that_fit(prompt_tokens, max_tokens, *limit[1:]))
            for limit in self._table.limits(self._roles[-1])
        )
        return min(most, default=MAX_SEQUENCES)

    def missing(self) -> list[str]:
        """Returns the roles without a usable group; empty if requests can be served.

        Prefill groups are not missing while a usable decode group computes prompts itself.
        """
        missing = self._without_groups()
        alone = missing == ["prefill"] and computing_prompts(self._table.usable("decode"))
        return [] if alone else missing

    def _without_groups(self) -> list[str]:
        missing, now_s = sorted(role for role in self._roles if not self._table.usable(role)), self._clock()
        self._missing_since_s = {role: self._missing_since_s.get(role, now_s) for role in missing}
        return missing

    def _long_without_groups(self) -> list[str]:
        """Returns the roles that have had no usable group for at least `router.group_wait_s`."""
        missing, longest_s = self._without_groups(), self._context.options.group_wait_s
        return [role for role in missing if self._clock() - self._missing_since_s[role] >= longest_s]

    def refused_roles(self) -> list[str]:
        """Returns the roles that have been `missing` for at least `router.group_wait_s`. While such a role exists,
        requests are refused; before, requests wait for a group."""
        return self._long_without_groups() if self.missing() else []

    def _routing_request(
        self, prompt: TokenIds, cache_salt: str, session: str, *, may_be_local: bool = False
    ) -> RoutingRequest:
        """Returns the properties of the request that the policy compares; hashes the prompt only if the policy
        compares cached prefixes."""
        block_hashes = {
            (unit, switch): PrefixKey.of(prompt, cache_salt, switch).block_hashes(unit)
            for unit, switch in self._table.hash_kinds()
        }
        return RoutingRequest(len(prompt), session, block_hashes, *self._load_costs, may_be_local)

    def _decode_groups(self) -> int:
        """Returns the number of usable groups that decode."""
        return len(self._table.usable(self._roles[-1]))

    def _pair(self, request: RoutingRequest, keep: str, full: Set[str], *, moved: bool = False) -> Pair:
        """Returns the prefill and the decode group; the same group twice if colocated.

        `keep`: name of the decode group to choose if it has a usable pair. `full`: names of decode groups to avoid if
        another one has a usable pair. `moved`: whether the prompt has left a decode group's queue: while a prefill
        group is usable, no decode group computes it. Raises `BusyError` if no group is usable.
        """
        missing, decodes = self._without_groups(), self._table.usable(self._roles[-1])
        self._drop_old_shunned()
        if missing == ["prefill"]:
            able = computing_prompts(decodes)
            met = self._able_alone(_preferred(able, keep, full) or able)
            if (alone := self._local.group(None, met, request)) is not None:
                self.local_prefills["no_prefill_group"] += 1
                return alone, alone
        if missing:
            raise BusyError(f"no {' and no '.join(missing)} group is up", retry_after_s=1.0)
        if len(self._roles) == 1:
            tried = [one for one in decodes if one.group.name not in full]
            both = self.choose(tried or decodes, request)
            return both, both
        prefills = self._table.usable("prefill")
        paired = self._met(decodes, lambda one: any(self._meet(p, one) for p in prefills))
        if keep or full:
            paired = _preferred(paired, keep, full)
        decodes = paired or decodes
        met = self._with_partner(prefills, decodes)
        # A moved prompt goes where `PromptMoves` has found the shortest queue, whatever the policy.
        prefill = (least_loaded if moved else self.choose)(met or prefills, request)
        if not moved:
            met = self._able_alone(decodes)
            holder = self._local.holder(prefill, met, request)
            alone = self._local.group(prefill, met, request) if holder is None else holder
            if alone is not None:
                self.local_prefills["queue" if holder is None else "cached"] += 1
                return alone, alone
        met = self._met(decodes, lambda other: self._meet(prefill, other))
        return prefill, self.choose(met or decodes, request)

    def _reachable_prefills(self) -> Sequence[RoutedGroup]:
        """Returns the usable prefill groups that respond and have a decode group to which they can send."""
        self._drop_old_shunned()
        responsive = [one for one in self._table.usable("prefill") if not one.suspected]
        return self._with_partner(responsive, self._table.usable("decode"))

    def _with_partner(
        self, prefills: Sequence[RoutedGroup], decodes: Sequence[RoutedGroup]
    ) -> Sequence[RoutedGroup]:
        """Returns the prefill groups that may be paired with one of `decodes`."""
        return self._met(prefills, lambda one: any(self._meet(one, other) for other in decodes))

    def _able_alone(self, decodes: Sequence[RoutedGroup]) -> Sequence[RoutedGroup]:
        """Returns the groups that may compute a whole request: avoids a group for a while after a failure there, if
        another one remains."""
        return self._met(decodes, lambda one: self._meet(one, one)) or decodes

    def _met(
        self, groups: Sequence[RoutedGroup], meets: Callable[[RoutedGroup], bool]
    ) -> Sequence[RoutedGroup]:
        """Returns the groups for which `meets` is true; returns all groups unchecked while no pair is avoided."""
        return [one for one in groups if meets(one)] if self._shunned else groups

    def _meet(self, prefill: RoutedGroup, decode: RoutedGroup) -> bool:
        """Returns whether the pair may be chosen; False for a while after a failed transfer between its groups."""
        return _names(prefill, decode) not in self._shunned

    def _shun(self, pair: Pair) -> None:
        """Avoids a pair for a while after a failed transfer, as the network between its groups may be down."""
        self._shunned[_names(*pair)] = self._clock() + SHUNNED_S

    def _drop_old_shunned(self) -> None:
        if self._shunned:
            now_s = self._clock()
            self._shunned = {one: until_s for one, until_s in self._shunned.items() if until_s > now_s}

    def profile(self, request: ProfileRequest) -> AsyncGenerator[int | TraceSummary, None]:
        """Records some steps of a rank; see `record_profile`."""
        return record_profile(self._dispatcher, [engine.group for engine in self.engines], request)

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

        See `run`, and `RouterRequest` for the parameters.
        """
        report = report or SessionReport()
        request = RouterRequest(request_id, prompt, sampling, timeout_s, decode, report, cache_salt, session)
        outputs: asyncio.Queue[Output | None] = asyncio.Queue()
        running = asyncio.ensure_future(self.run(request, outputs.put_nowait))
        running.add_done_callback(lambda _: outputs.put_nowait(None))
        try:
            while (output := await outputs.get()) is not None:
                yield output
            running.result()
        finally:
            running.cancel()
            await to_its_end(running)
            if not running.cancelled():
                running.exception()  # marks an error as retrieved after an early `aclose`

    async def run(self, request: RouterRequest, emit: Emit) -> None:
        """Emits the answers to a request, and returns when both groups have released the request. A cancellation
        aborts the request in both groups.

        A request that loses a group, or whose KV arrives damaged twice, continues after its last token on other
        groups; see `disagg.router.recovery`.

        Raises `InvalidRequestError`, `RequestInUseError`, `BusyError`, `PromptTooLongError`, `RequestTimeoutError`,
        `PeerLostError`, or another `DisaggError`.
        """
        sampling, report, now_s = request.sampling, request.report, self._clock()
        check_sampling(sampling)  # the leaders check again, with the vocabulary
        tokens = _packed(request.prompt)
        branch = Branch(tuple(new_answers(sampling, request.decode)), sampling)
        report.answers = [answer.tokens for answer in branch.answers]
        report.prompt_tokens = len(tokens)
        deadline_s = now_s + request.timeout_s
        routed = RoutedRequest(
            request.request_id, tokens, request.cache_salt, now_s, deadline_s, report, request.priority
        )
        may_be_local = computes_locally(sampling)
        if not may_be_local and (long := self._long_without_groups()):
            raise BusyError(f"no {' and no '.join(long)} group is up", retry_after_s=1.0)
        routing = self._routing_request(
            tokens, request.cache_salt, request.session, may_be_local=may_be_local
        )
        choose = partial(self._pair, routing)
        tail_tokens = partial(self._tail_tokens, routing)
        await RequestRun(self._context, routed, choose, routing.missing_tokens, tail_tokens, emit).run(branch)

    def _tail_tokens(self, request: RoutingRequest, prefill: RoutedGroup, decode: RoutedGroup) -> int:
        """Returns how many of the prompt's last tokens `decode` is to compute, and counts a prompt with a tail."""
        if self._clock() < self._undivided_until_s or self.choose is not prefix_aware:
            return 0  # other policies do not know what the groups have cached
        tail_tokens = self._split.tail_tokens(prefill, decode, request)
        if tail_tokens:
            self.local_prefills["split"] += 1
        return tail_tokens

    def _stop_dividing(self) -> None:
        self._undivided_until_s = self._clock() + self._undivided_s
        self._undivided_s = min(2 * self._undivided_s, MOST_UNDIVIDED_S)

    def check(self) -> None:
        """Asserts that the waiting prompts of decode groups are consistent with the groups' loads."""
        self._moves.check()

    def _recovered(self, loss: Loss) -> None:
        """Counts a recovery."""
        self.recoveries[loss.value] += 1

    def _dead_groups(self, names: Iterable[str]) -> set[str]:
        engines = {name: self._table.get(name) for name in names}
        return {
            name
            for name, engine in engines.items()
            if engine is None or has_rank_in(engine, self._dispatcher.dead) or self.statuses.broken(engine)
        }

    def _silent_groups(self, names: Iterable[str]) -> set[str]:
        dead = self._dead_groups(names := set(names))
        engines = [engine for name in names - dead if (engine := self._table.get(name)) is not None]
        return {
            engine.group.name for engine in engines if engine.suspected or self._table.has_lost_rank(engine)
        }


def _packed(prompt: Sequence[int]) -> TokenIds:
    try:
        return pack_tokens(prompt)
    except ValueError as exc:
        raise InvalidRequestError(f"the prompt cannot be served: {exc}", param="prompt") from exc


def _preferred(decodes: Sequence[RoutedGroup], keep: str, full: Set[str]) -> list[RoutedGroup]:
    """Returns the group named `keep` if it is among `decodes`, else all groups that are not `full`."""
    kept = [one for one in decodes if one.group.name == keep]
    return kept or [one for one in decodes if one.group.name not in full]


def _names(prefill: RoutedGroup, decode: RoutedGroup) -> tuple[str, str]:
    return prefill.group.name, decode.group.name
