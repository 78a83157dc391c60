"""Policies that choose a request's prefill and decode group, and the load counts they use. No I/O."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from disagg.core.config.read import PolicyName, RouterConfig
from disagg.core.errors import BusyError
from disagg.core.local_prefill import slowdown
from disagg.core.prefixes import HeldPrefixes, Tier
from disagg.core.types import GroupInfo
from disagg.router.load_costs import NOT_MEASURED, LoadCosts

DEFAULTS = RouterConfig()
SLACK = 16
"""Groups whose costs differ by at most 1/`SLACK` of the prompt's tokens count as equal; see `prefix_aware`."""
SESSION_LOAD = 1.25
"""Largest load of a group that keeps its client sessions, relative to the mean load (c of Mirrokni et al.)."""
HELD_STEPS = 4
"""Most steps, of `local_prefill_tokens` each, in which a decode group computes what it has not cached of a prompt
instead of an idle prefill group."""
SHORT_S = 0.045
"""Time to compute a prompt up to which it is not divided: the host takes about 30 ms to launch a tail through the
layers of an 8B model."""
_TILE_TOKENS = 64
"""Heads of divided prompts end at a multiple: whole pages for the prefix cache, whole tiles of matrix products. Tails
have at least as many tokens."""
MOVE_MARGIN = 1.5
"""Factor by which a prefill group must be expected sooner than the decode group in which a prompt waits, so that the
prompt moves."""


@dataclass(slots=True, eq=False)
class RoutedGroup:
    """A group with its load counts, which `SessionLoad` updates."""

    group: GroupInfo
    requests: int = 0
    """This router's running requests in the group; in a decode group, their sequences."""
    tokens: int = 0
    """Prompt tokens of the running requests, minus prefix cache hits. A prefill group counts only prompts not
    computed yet, so the number approximates its queue."""
    local_tokens: int = 0
    """In a decode group, the part of `tokens` that the group computes itself and has not computed yet."""
    local_prompts: int = 0
    """In a decode group, number of the prompts that `local_tokens` counts."""
    answering: int = 0
    """In a decode group, the part of `requests` whose prompts are computed."""
    served: int = 0
    """Requests ever sent to the group."""
    routers: int = 1
    """Routers with requests in the group, by its latest report. Each router counts only its own requests; where the
    load of all routers matters, each router is assumed to have as many as this one."""
    others_use: bool = False
    """Whether the group's latest report counts a router that is not this one."""
    prompt_tokens_per_s: float = 0.0
    """Rate at which the group computes prompts, by its reports; 0 before the first measurement."""
    at_report: tuple[int, int] = (0, 0)
    """`requests` and `served` at the latest report."""
    lost: bool = False
    suspected: bool = False
    """Whether a rank of the group is silent while the group is not lost."""
    draining: bool = False
    """Whether the group finishes its requests and gets no new ones."""
    held: HeldPrefixes = field(default_factory=HeldPrefixes)
    """Prefixes cached in the KV pool, from KV events; empty if the router does not watch them."""
    lower: dict[Tier, HeldPrefixes] = field(default_factory=dict)
    """Prefixes in the tiers below the KV pool, from KV events; empty for a group without these tiers."""
    load_costs: LoadCosts = NOT_MEASURED
    """Costs of loads from these tiers, from the group's reports."""
    shares: bool = field(init=False)
    """Value of `GroupInfo.shares_host_cache`."""

    def __post_init__(self) -> None:
        self.shares = self.group.shares_host_cache

    @property
    def usable(self) -> bool:
        """Whether the group takes new requests."""
        return not self.lost and not self.draining

    def reported(self, routers: int) -> None:
        """Takes from a report the number of routers with requests in the group.

        The report may be older than the end of this router's last request. So this router counts as one of them if it
        had a request in the group at any time since the report before. Another router's requests may then be missed
        until the next report.
        """
        requests, served = self.at_report
        used = self.requests > 0 or requests > 0 or self.served > served
        self.at_report = self.requests, self.served
        self.routers, self.others_use = max(1, routers), routers > used

    def held_in(self, tier: Tier) -> HeldPrefixes:
        """Returns the prefixes in `tier`; empty prefixes are added for a tier that is not known yet."""
        return self.held if tier == "device" else self.lower.setdefault(tier, HeldPrefixes())

    @property
    def hash_kinds(self) -> set[tuple[int, int]]:
        """Kinds of the block hashes in each tier that has prefixes."""
        return {tier.kind for tier in (self.held, *self.lower.values()) if tier.held}


@dataclass(slots=True, eq=False)
class SessionLoad:
    """Load that one session adds to the counts of its groups."""

    prefill: RoutedGroup
    decode: RoutedGroup
    """The decode group; equal to `prefill` if colocated."""
    sequences: int
    """Number of sequences of the request; each sequence counts as one of the decode group's `requests`."""
    tokens: dict[RoutedGroup, int]
    """Prompt tokens that each group has to compute or receive."""
    _queued: bool = False
    _answering: bool = False
    """Whether `decode.answering` includes the request."""

    def begin(self) -> None:
        """Adds the request to both groups' counts."""
        for engine, tokens in self.tokens.items():
            engine.requests += self._requests(engine)
            engine.served += 1
            engine.tokens += tokens
        if self.is_local:
            self._count_local(1)

    @property
    def is_local(self) -> bool:
        """Whether a decode group computes the prompt too."""
        return self.prefill is self.decode and self.decode.group.role == "decode"

    @property
    def is_queued(self) -> bool:
        """Whether the decode group's local prompts include this one."""
        return self._queued

    def prompt_computed(self) -> None:
        """Subtracts the prompt from a prefill group's tokens. A group that also decodes counts the prompt until the
        request ends."""
        if self.prefill is not self.decode:
            self.prefill.tokens -= self.tokens[self.prefill]
            self.tokens[self.prefill] = 0
        self._end_local()
        if not self._answering:
            self._answering = True
            self.decode.answering += self.sequences

    def _end_local(self) -> None:
        if self._queued:
            self._count_local(-1)

    def _count_local(self, prompts: int) -> None:
        self._queued = prompts > 0
        self.decode.local_prompts += prompts
        self.decode.local_tokens += prompts * self.tokens[self.decode]

    def end(self) -> None:
        """Subtracts the request from both groups' counts."""
        self._end_local()
        if self._answering:
            self._answering = False
            self.decode.answering -= self.sequences
        for engine, tokens in self.tokens.items():
            engine.requests -= self._requests(engine)
            engine.tokens -= tokens

    def _requests(self, engine: RoutedGroup) -> int:
        return self.sequences if engine is self.decode else 1


class PromptCost(NamedTuple):
    """Work of a group for a prompt, in tokens whose computation takes equally long."""

    missing: int
    """Tokens that no tier of the group's prefix cache has."""
    loading: int
    """Time to load cached tokens from lower tiers."""


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """Properties of a request that a policy uses to choose a group."""

    tokens: int
    """Tokens of the prompt."""
    session: str = ""
    """The client's name for the conversation; empty without one."""
    block_hashes: Mapping[tuple[int, int], Sequence[int]] = field(default_factory=dict)
    """Block hashes of the prompt, by `unit_tokens` and `switch_tokens` of the groups; see `HeldPrefixes`."""
    host_load_cost: float = DEFAULTS.host_load_cost
    storage_load_cost: float = DEFAULTS.storage_load_cost
    """Times to load a token from host memory and from the storage, each divided by the time to compute it, for groups
    that have not measured them; see `LoadCosts`."""
    may_be_local: bool = False
    """Whether a decode group may compute the prompt too; see `computes_locally`."""

    def missing_tokens(self, engine: RoutedGroup) -> int:
        """Returns the prompt tokens minus the group's prefix cache hit, plus the cost of loading a part of the hit.

        At least 1, because the last token is always computed.
        """
        return sum(self.cost(engine))

    def cost(self, engine: RoutedGroup, shared: int = 0) -> PromptCost:
        """Returns the group's work for this prompt: the longest hit of a tier counts as far as it exceeds the hits of
        the faster tiers.

        `shared`: tokens that a group has in the host memory that it shares, which count like stored ones.
        """
        hit = self._hit(engine.held)
        if not (engine.lower or (shared and engine.shares)):
            return PromptCost(max(1, self.tokens - hit), 0)
        in_host = max(hit, self._hit_in(engine, "host"))
        stored = max(in_host, self._hit_in(engine, "storage"), shared if engine.shares else 0)
        host, storage = engine.load_costs.or_settings(self.host_load_cost, self.storage_load_cost)
        loading = host * (in_host - hit) + storage * (stored - in_host)
        return PromptCost(max(1, self.tokens - stored), math.ceil(loading))

    def shared_tokens(self, engines: Sequence[RoutedGroup]) -> int:
        """Returns the longest hit in host memory that a group shares."""
        return max((self._hit_in(engine, "host") for engine in engines if engine.shares), default=0)

    def _hit_in(self, engine: RoutedGroup, tier: Tier) -> int:
        return self._hit(engine.lower[tier]) if tier in engine.lower else 0

    def _hit(self, held: HeldPrefixes) -> int:
        block_hashes = self.block_hashes.get(held.kind)
        if not block_hashes or block_hashes[0] not in held.held:  # true for most groups of a large cluster
            return 0
        return min(self.tokens, held.longest_tokens(block_hashes))


Policy = Callable[[Sequence[RoutedGroup], RoutingRequest], RoutedGroup]
"""Function that chooses one of the groups of a role. Raises `BusyError` if no group is usable."""


def least_loaded(engines: Sequence[RoutedGroup], request: RoutingRequest) -> RoutedGroup:
    """Returns the group with the fewest queued prompt tokens; ties: the fewest requests, then the first group."""
    return min(_usable(engines), key=lambda engine: (engine.tokens, engine.requests))


def round_robin(engines: Sequence[RoutedGroup], request: RoutingRequest) -> RoutedGroup:
    """Returns the group to which the fewest requests were ever sent; of several such groups, the first."""
    return min(_usable(engines), key=lambda engine: engine.served)


def prefix_aware(engines: Sequence[RoutedGroup], request: RoutingRequest) -> RoutedGroup:
    """Returns the group with the lowest cost: queued tokens, uncached prompt tokens and the time of loads.

    Requests of a named session use the same decode group instead.

    Groups whose cost exceeds the lowest by at most 1/16 of the prompt count as equal. Otherwise a short prefix common
    to all prompts would send every request to one group. Among equal groups the order is: fewest requests, shortest
    loads, fewest cached blocks.
    """
    usable = _usable(engines)
    if request.session and usable[0].group.role == "decode":
        return _of_session(usable, request.session)
    costs = _costs(usable, request, request.shared_tokens(usable))
    totals = [
        engine.tokens + missing + loading for engine, (missing, loading) in zip(usable, costs, strict=True)
    ]
    most = min(totals) + request.tokens // SLACK
    equal = [number for number, total in enumerate(totals) if total <= most]
    fewest = min([usable[number].requests for number in equal])
    ranks = [
        (costs[number].loading, len(engine.held.held), totals[number], engine.served, number)
        for number in equal
        if (engine := usable[number]).requests == fewest
    ]
    return usable[min(ranks)[-1]]


def _costs(engines: Sequence[RoutedGroup], request: RoutingRequest, shared: int) -> list[PromptCost]:
    """Returns each group's cost of the prompt; `shared`: see `RoutingRequest.cost`.

    Most groups of a large cluster have nothing of a prompt. So `request.cost` is called only for groups with its
    first block.
    """
    costs = [PromptCost(max(1, request.tokens), 0)] * len(engines)
    firsts = {block_hashes[0] for block_hashes in request.block_hashes.values() if block_hashes}
    if not firsts:
        return costs
    having = {number for number, engine in enumerate(engines) if not firsts.isdisjoint(engine.held.held)}
    having.update(
        number
        for number, engine in enumerate(engines)
        if engine.lower
        for tier in engine.lower.values()
        if not firsts.isdisjoint(tier.held)
    )
    if shared:
        having.update(number for number, engine in enumerate(engines) if engine.shares)
    for number in having:
        costs[number] = request.cost(engines[number], shared)
    return costs


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """Rule by which decode groups compute prompts themselves."""

    queue_tokens: int
    """See `RouterConfig.local_prefill_queue_tokens`."""
    cost: float
    """See `RouterConfig.local_prefill_cost`."""

    def group(
        self, prefill: RoutedGroup | None, decodes: Sequence[RoutedGroup], request: RoutingRequest
    ) -> RoutedGroup | None:
        """Returns the decode group that is to compute the whole request; None if `prefill` is to compute the prompt.

        The group with the shortest queue of such prompts is compared with the prefill group, as in NVIDIA Dynamo's
        conditional disaggregation. Prompts take longer in a group with many requests (`slowdown`). Groups whose costs
        differ little count as equal, as in `prefix_aware`. `prefill` is None while no prefill group is usable.
        """
        waiting_tokens = prefill.tokens * prefill.routers if prefill is not None else self.queue_tokens
        if not request.may_be_local or waiting_tokens < self.queue_tokens:
            return None
        able = computing_prompts(decodes)
        if not able:
            return None
        costs = [local_cost(one, request.missing_tokens(one)) for one in able]
        least = min(costs)
        if prefill is not None and self.cost * least >= waiting_tokens + request.missing_tokens(prefill):
            return None
        equal = [
            one for one, cost in zip(able, costs, strict=True) if cost <= least + request.tokens // SLACK
        ]
        return min(equal, key=lambda one: (one.requests, one.tokens, one.served))

    def holder(
        self, prefill: RoutedGroup, decodes: Sequence[RoutedGroup], request: RoutingRequest
    ) -> RoutedGroup | None:
        """Returns an idle decode group that has cached so much more of the prompt than `prefill` that it computes the
        rest sooner, in a few steps; None if there is none.

        This is usual for the next turn of a conversation: the decode group has the answer of the last turn, and the
        end of a prompt that both groups have computed.
        """
        if not request.may_be_local:
            return None
        idle = [one for one in computing_prompts(decodes) if not (one.requests or one.others_use)]
        if not idle:
            return None
        costs = [sum(cost) for cost in _costs(idle, request, 0)]
        missing = min(costs)
        best = idle[costs.index(missing)]
        most = HELD_STEPS * best.group.leader.local_prefill_tokens
        sooner = self.cost * missing < request.missing_tokens(prefill)
        return best if missing <= most and sooner else None

    def leaves(
        self, decode: RoutedGroup, prefill: RoutedGroup, missing_tokens: Callable[[RoutedGroup], int]
    ) -> bool:
        """Returns whether the newest prompt in the queue of `decode` is to move to `prefill`.

        `missing_tokens` returns the tokens of the prompt that a group has to compute.
        """
        here, there = self.cost * local_cost(decode), prefill.tokens * prefill.routers
        if MOVE_MARGIN * there > here:  # most often so: no look at the cached prefixes
            return False
        return MOVE_MARGIN * (there + missing_tokens(prefill)) < here


@dataclass(frozen=True, slots=True)
class SplitPrompts:
    """Rule by which a prefill group and a decode group compute one prompt together."""

    least_tokens: int
    """See `RouterConfig.split_prompt_tokens`."""

    def tail_tokens(self, prefill: RoutedGroup, decode: RoutedGroup, request: RoutingRequest) -> int:
        """Returns the number of the prompt's last tokens that `decode` is to compute; 0: `prefill` computes all.

        At most half of the tokens that `prefill` has to compute, and what `decode` computes in one step, which begins
        with the last chunk of `prefill`. Neither group may have requests of any router: answers would wait for the
        tail's step, and this step for other prompts. A prompt of which `decode` has cached more is not divided: it
        would compute the tail, which may be cached, again. Nor is a prompt that `prefill` computes within `SHORT_S`.
        """
        most = decode.group.leader.tail_tokens
        if not (self.least_tokens and most and request.may_be_local) or prefill is decode:
            return 0
        if prefill.requests or decode.requests or prefill.others_use or decode.others_use:
            return 0
        missing = request.cost(prefill).missing
        least = max(self.least_tokens, SHORT_S * prefill.prompt_tokens_per_s)
        if missing < least or request.cost(decode).missing < missing:
            return 0
        head = -(-(request.tokens - min(most, missing // 2)) // _TILE_TOKENS) * _TILE_TOKENS
        tail_tokens = request.tokens - head
        return tail_tokens if tail_tokens >= _TILE_TOKENS else 0


def local_cost(decode: RoutedGroup, added: int = 0) -> float:
    """Returns the tokens in the group's queue of prompts, weighted by `slowdown`. `added`: tokens of one more
    prompt."""
    tokens = decode.local_tokens * decode.routers + added
    waiting = decode.local_prompts * decode.routers + (added > 0)
    running = decode.answering * decode.routers
    return tokens * slowdown(decode.group.leader.local_prefill_tokens, running, waiting)


def computing_prompts(decodes: Iterable[RoutedGroup]) -> list[RoutedGroup]:
    """Returns the decode groups that compute prompts themselves."""
    return [one for one in decodes if one.group.leader.local_prefill_tokens]


POLICIES: dict[PolicyName, Policy] = {
    "prefix_aware": prefix_aware,
    "least_loaded": least_loaded,
    "round_robin": round_robin,
}


def _of_session(engines: Sequence[RoutedGroup], session: str) -> RoutedGroup:
    """Returns the decode group of a client's session by rendezvous hashing with bounded loads.

    Each session has its own order of the groups; the first group below the load limit is returned. A new or removed
    group moves only its own sessions (Thaler and Ravishankar 1998; Mirrokni, Thorup and Zadimoghaddam 2016).
    """
    order = sorted(engines, key=lambda e: xxhash.xxh3_64_intdigest(f"{e.group.name} {session}".encode()))
    full = math.ceil(SESSION_LOAD * (1 + sum(engine.requests for engine in engines)) / len(engines))
    return next(engine for engine in order if engine.requests < full)


def _usable(engines: Sequence[RoutedGroup]) -> list[RoutedGroup]:
    usable = [
        engine for engine in engines if not (engine.lost or engine.draining)
    ]  # `engine.usable`, inlined for speed
    if not usable:
        roles = sorted({engine.group.role for engine in engines}) or ["any"]
        raise BusyError(f"no {'/'.join(roles)} group is up", retry_after_s=1.0)
    return usable
