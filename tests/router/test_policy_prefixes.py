"""Which group the prefix-aware policy chooses; pure functions, no messages."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from disagg.core.prefixes import PrefixKey, Tier
from disagg.core.status import GroupStatus
from disagg.core.types import (
    PROTOCOL_VERSION,
    GroupInfo,
    KVLayout,
    PageServer,
    RankInfo,
    Shard,
    Span,
)
from disagg.kv.event_log import KVEventLog
from disagg.router.load_costs import MOST_COST, LoadCosts
from disagg.router.policy import SESSION_LOAD, SLACK, RoutedGroup, RoutingRequest, SessionLoad, prefix_aware

UNIT = 64
LAYOUT = KVLayout(1, 1, 8, "float32")


def engine(name: str, role: str = "prefill", **counts: int) -> RoutedGroup:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"")
    return RoutedGroup(GroupInfo(name, role, PROTOCOL_VERSION, "", LAYOUT, 16, "inproc", (rank,)), **counts)


def holds(
    engine: RoutedGroup,
    *prompts: range,
    unit: int = UNIT,
    switch: int = 0,
    salt: str = "",
    tier: Tier = "device",
) -> RoutedGroup:
    """The engine has reported that it has cached the prompts in `tier`."""
    kv_events = KVEventLog(unit)
    kv_events.add({mark: None for p in prompts for mark in PrefixKey.of(p, salt, switch).block_hashes(unit)})
    assert engine.held_in(tier).apply(kv_events.digest(), switch)
    return engine


def asking(prompt: range, *engines: RoutedGroup, session: str = "", salt: str = "") -> RoutingRequest:
    kinds = {kind for e in engines for kind in e.hash_kinds}
    block_hashes = {
        (unit, switch): PrefixKey.of(prompt, salt, switch).block_hashes(unit) for unit, switch in kinds
    }
    return RoutingRequest(len(prompt), session, block_hashes)


def test_the_longest_beginning_wins_until_its_load_outweighs_it() -> None:
    prompt = range(1000)
    engines = [engine("a"), holds(engine("b"), range(512)), holds(engine("c"), range(320))]
    request = asking(prompt, *engines)
    assert [request.missing_tokens(e) for e in engines] == [1000, 488, 680]
    assert prefix_aware(engines, request).group.name == "b"
    engines[1].tokens = 300
    assert prefix_aware(engines, request).group.name == "c"
    engines[2].tokens = 500
    assert prefix_aware(engines, request).group.name == "b"
    engines[1].tokens = 800
    assert prefix_aware(engines, request).group.name == "a"


def test_who_is_gone_is_not_chosen_for_what_it_holds() -> None:
    engines = [engine("a"), holds(engine("b"), range(512)), holds(engine("c"), range(512))]
    engines[1].lost = engines[2].draining = True
    assert prefix_aware(engines, asking(range(600), *engines)).group.name == "a"


def test_a_prompt_that_is_held_whole_lacks_its_last_token() -> None:
    one = holds(engine("a"), range(512))
    assert asking(range(512), one).missing_tokens(one) == 1


@pytest.mark.parametrize("mine", [0, 100])
def test_groups_of_other_pages_salts_and_lengths_are_compared_rightly(mine: int) -> None:
    """Marks of each kind are made for each kind; what holds for short prompts does not for long ones."""
    coarse = holds(engine("coarse"), range(512), unit=256, switch=mine)
    fine = holds(engine("fine"), range(384), switch=mine)
    request = asking(range(400), coarse, fine)
    assert [request.missing_tokens(e) for e in (coarse, fine)] == [400 - 256, 400 - 384]
    other = asking(range(400), coarse, fine, salt="tenant")
    assert [other.missing_tokens(e) for e in (coarse, fine)] == [400, 400]
    if mine:
        short = asking(range(100), fine)
        assert short.missing_tokens(fine) == 100


TIERS: tuple[Tier, ...] = ("device", "host", "storage")


@pytest.mark.parametrize("tokens", [448, 512, 1000, 3000])
def test_of_equal_hits_the_fastest_tier_is_preferred_and_any_tier_to_computing(tokens: int) -> None:
    """With equal queues; hits of 448 tokens and more are longer than the slack of the longest prompt."""
    prompt = range(tokens)
    engines = [engine("none"), *(holds(engine(tier), range(448), tier=tier) for tier in reversed(TIERS))]
    for expected in (*TIERS, "none"):
        assert prefix_aware(engines, asking(prompt, *engines)).group.name == expected
        engines = [one for one in engines if one.group.name != expected]


def test_a_load_costs_less_than_computing_and_more_than_nothing() -> None:
    one = holds(holds(engine("a"), range(256)), range(512), tier="host", unit=128)
    holds(one, range(896), tier="storage")
    request = replace(asking(range(1000), one), host_load_cost=0.1, storage_load_cost=0.5)
    assert request.cost(one) == (1000 - 896, 26 + 192)
    assert request.missing_tokens(one) == 104 + 218


def sharing(name: str, **counts: int) -> RoutedGroup:
    """A group that reads the others' host memory."""
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"", page_server=PageServer(1, b"", "tls"))
    return RoutedGroup(
        GroupInfo(name, "prefill", PROTOCOL_VERSION, "", LAYOUT, 16, "inproc", (rank,)), **counts
    )


def test_a_hit_in_another_groups_memory_counts_as_stored_for_groups_that_share_it() -> None:
    owner, reader, alone = (
        holds(sharing("owner"), range(896), tier="host"),
        sharing("reader"),
        engine("alone"),
    )
    groups = [owner, reader, alone]
    request = replace(asking(range(1000), *groups), host_load_cost=0.1, storage_load_cost=0.5)
    shared = request.shared_tokens(groups)
    assert shared == 896
    assert [request.cost(one, shared) for one in groups] == [(104, 90), (104, 448), (1000, 0)]
    assert prefix_aware(groups, request) is owner
    owner.tokens = 600
    assert prefix_aware(groups, request) is reader, "reads faster than it computes, and its queue is empty"
    assert prefix_aware(groups[1:], request) is reader  # nobody has the prompt: equal costs, the first one
    assert request.shared_tokens(groups[1:]) == 0
    holds(alone, range(896), tier="host")
    assert request.shared_tokens([reader, alone]) == 0, "its memory is not shared"


def test_a_long_hit_in_storage_is_compared_with_a_short_one_in_the_pool() -> None:
    """The storage's rate decides: a fast disk is worth a load of the whole prompt, a slow one is not."""
    near, far = holds(engine("near"), range(512)), holds(engine("far"), range(960), tier="storage")
    request = asking(range(1000), near, far)
    for cost, expected in ((0.1, "far"), (0.9, "near")):
        assert prefix_aware([near, far], replace(request, storage_load_cost=cost)).group.name == expected
    far.tokens = 1000
    assert prefix_aware([near, far], replace(request, storage_load_cost=0.0)).group.name == "near"


def test_a_group_that_has_measured_its_loads_is_weighed_by_them() -> None:
    near, far = holds(engine("near"), range(512)), holds(engine("far"), range(960), tier="host")
    request = asking(range(1000), near, far)
    assert request.cost(far) == (40, 48), "0.05 of 960 tokens, by the setting"
    far.load_costs = LoadCosts.of(
        GroupStatus("far", "prefill", prompt_tokens_per_s=1000.0, host_load_tokens_per_s=1250.0)
    )
    assert request.cost(far) == (40, 768)
    assert prefix_aware([near, far], request).group.name == "near"
    far.load_costs = LoadCosts(host=0.01)
    assert prefix_aware([near, far], request).group.name == "far"


@pytest.mark.parametrize(
    ("measured", "costs"),
    [
        (LoadCosts(), (0.05, 0.25)),
        (LoadCosts(host=0.125), (0.125, 0.25)),
        (LoadCosts(host=0.5), (0.5, 0.5)),
        (LoadCosts(fetch=0.5), (0.05, 0.55)),
        (LoadCosts(host=0.125, fetch=0.5), (0.125, 0.625)),
    ],
)
def test_settings_are_the_costs_of_what_is_not_measured(
    measured: LoadCosts, costs: tuple[float, float]
) -> None:
    assert measured.or_settings(0.05, 0.25) == pytest.approx(costs)


@pytest.mark.parametrize(
    ("rates", "costs"),
    [
        ({"prompt_tokens_per_s": 100.0}, (0.0, 0.0)),
        ({"host_load_tokens_per_s": 100.0}, (0.0, 0.0)),
        (
            {
                "prompt_tokens_per_s": 100.0,
                "host_load_tokens_per_s": 1000.0,
                "storage_fetch_tokens_per_s": 200.0,
            },
            (0.1, 0.5),
        ),
        ({"prompt_tokens_per_s": 1e300, "host_load_tokens_per_s": 1e-300}, (MOST_COST, 0.0)),
        ({"prompt_tokens_per_s": math.inf, "host_load_tokens_per_s": math.inf}, (MOST_COST, 0.0)),
    ],
)
def test_costs_of_reported_rates(rates: dict[str, float], costs: tuple[float, float]) -> None:
    assert LoadCosts.of(GroupStatus("prefill", "prefill", **rates)) == costs


HELD = st.tuples(*[st.integers(0, 40)] * 3)


@given(st.lists(HELD, min_size=1, max_size=5), st.integers(1, 3000), st.floats(0, 1), st.floats(0, 1))
def test_more_in_a_faster_tier_never_costs_more(
    held: list[tuple[int, int, int]], tokens: int, host: float, storage: float
) -> None:
    """Also with digests that are late: a tier may still name what a faster tier has, or what no tier has any more."""
    for units in held:
        one, faster = engine("a"), engine("b")
        for number, (tier, count) in enumerate(zip(TIERS, units, strict=True)):
            holds(one, range(count * UNIT), tier=tier)
            holds(faster, range(max(units[number:]) * UNIT), tier=tier)
        request = replace(
            asking(range(tokens), one, faster),
            host_load_cost=min(host, storage),
            storage_load_cost=max(host, storage),
        )
        assert 1 <= request.missing_tokens(faster) <= request.missing_tokens(one) <= tokens + 1


def test_a_new_group_gets_what_has_no_better_place() -> None:
    """A beginning that all prompts have, but too short to matter, does not keep them all in one place."""
    old, new = holds(engine("old"), range(64), range(1000, 3000)), engine("new")
    chosen = Counter[str]()
    for number in range(10):
        prompt = range(10_000 * number, 10_000 * number + 2000)
        one = prefix_aware([old, new], asking(prompt, old, new))
        chosen[one.group.name] += 1
        one.requests += 1
        one.tokens += 2000
    assert chosen == {"old": 5, "new": 5}
    calm_old, calm_new = holds(engine("old"), range(64)), engine("new")
    assert prefix_aware([calm_old, calm_new], asking(range(2000), calm_old)).group.name == "new"


COUNTS = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 20), st.integers(0, 40)), min_size=1, max_size=8
)


@given(COUNTS, st.integers(1, 4000))
def test_the_choice_is_never_far_from_the_least_to_do(
    counts: list[tuple[int, int, int]], tokens: int
) -> None:
    """And enough before it drives a request away from any group, whatever that holds."""
    engines = [
        holds(engine(f"e{i}", tokens=load, requests=requests), range(units * UNIT))
        for i, (load, requests, units) in enumerate(counts)
    ]
    request = asking(range(tokens), *engines)
    costs = {e.group.name: e.tokens + request.missing_tokens(e) for e in engines}
    one = prefix_aware(engines, request)
    assert costs[one.group.name] <= min(costs.values()) + tokens // SLACK
    one.tokens = max(e.tokens for e in engines) + 2 * tokens + 1
    if len(engines) > 1:
        assert prefix_aware(engines, request) is not one


@given(st.lists(st.integers(0, 50), min_size=1, max_size=9), st.text(max_size=20))
def test_a_session_never_overfills_a_group(requests: list[int], session: str) -> None:
    assume(session)
    engines = [engine(f"e{i}", "decode", requests=count, tokens=9 * i) for i, count in enumerate(requests)]
    one = prefix_aware(engines, RoutingRequest(10, session))
    assert one.requests < SESSION_LOAD * (sum(requests) + 1) / len(requests) + 1


@given(st.integers(2, 8), st.integers(0, 7), st.text(min_size=1, max_size=20))
def test_a_session_keeps_its_group_when_others_come_and_go(groups: int, gone: int, session: str) -> None:
    """Rendezvous hashing: only the sessions of a group that goes move, only to a new one do they move to."""
    engines = [engine(f"decode-{i}", "decode") for i in range(groups)]
    home = prefix_aware(engines, RoutingRequest(10, session))
    left = [e for i, e in enumerate(engines) if i != gone % groups]
    if home in left:
        assert prefix_aware(left, RoutingRequest(10, session)) is home
    more = [*engines, engine("decode-new", "decode")]
    assert prefix_aware(more, RoutingRequest(10, session)).group.name in (home.group.name, "decode-new")


def test_sessions_spread_and_a_full_group_gives_way() -> None:
    engines = [engine(f"decode-{i}", "decode") for i in range(4)]
    homes = Counter(prefix_aware(engines, RoutingRequest(1, f"s{i}")).group.name for i in range(400))
    assert min(homes.values()) > 50
    for number in range(400):  # all at once: nobody is over 1.25 times the mean
        prefix_aware(engines, RoutingRequest(1, f"s{number}")).requests += 1
    assert max(e.requests for e in engines) <= 125
    home = prefix_aware([engine(f"decode-{i}", "decode") for i in range(4)], RoutingRequest(1, "s"))
    for one in engines:
        one.requests = 9 if one.group.name == home.group.name else 1
    assert prefix_aware(engines, RoutingRequest(1, "s")).group.name != home.group.name


def test_prefill_groups_know_no_sessions() -> None:
    engines = [holds(engine("a"), range(512)), engine("b")]
    assert {
        prefix_aware(engines, asking(range(600), *engines, session=f"s{i}")).group.name for i in range(20)
    } == {"a"}


def test_several_answers_weigh_in_a_decode_group_as_if_each_were_asked_for_alone() -> None:
    prefill, one, other = engine("p"), engine("a", "decode"), engine("b", "decode")

    def load(decode: RoutedGroup, n: int) -> SessionLoad:
        return SessionLoad(prefill, decode, n, {prefill: 0, decode: 0})  # the whole prompt is cached

    wide = load(one, 8)
    wide.begin()
    for _ in range(8):
        chosen = prefix_aware([one, other], asking(range(1)))
        assert chosen is other or other.requests == 8
        load(chosen, 1).begin()
    assert prefill.requests == 9, "each prompt is computed once"
    wide.end()
    assert (prefill.requests, one.requests) == (8, 0)
