"""Which requests a decode group computes alone, and how its queue of prompts is counted; pure functions."""

from __future__ import annotations

import pytest

from disagg.core.local_prefill import FEWEST_ANSWERS_PER_PAUSE, computes_locally, pauses, slowdown
from disagg.core.prefixes import Digest, PrefixKey, pack_block_hashes
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, SamplingParams, Shard, Span
from disagg.router import policy
from disagg.router.policy import LocalPrefill, RoutedGroup, RoutingRequest, SessionLoad, SplitPrompts

RULE = LocalPrefill(queue_tokens=100, cost=2.0)
ASKED = RoutingRequest(50, may_be_local=True)


def group(name: str, role: str, *, able: bool = True, tokens: int = 0, local_tokens: int = 0) -> RoutedGroup:
    shard, most = Shard(0, Span(0, 1), Span(0, 1)), 2048 if able else 0
    rank = RankInfo(0, shard, name, b"", local_prefill_tokens=256 if able else 0, tail_tokens=most)
    layout = KVLayout(1, 1, 8, "float32")
    info = GroupInfo(name, role, PROTOCOL_VERSION, "", layout, 16, "inproc", (rank,))
    return RoutedGroup(info, tokens=tokens, local_tokens=local_tokens)


@pytest.mark.parametrize(
    ("waiting", "local", "expected"),
    [
        (99, 0, None),  # the prefill group's queue is short
        (100, 0, "d"),  # 2 x 50 tokens here, 100 + 50 there
        (100, 25, None),  # 2 x 75 here
        (101, 25, "d"),
    ],
)
def test_the_shorter_queue_wins(waiting: int, local: int, expected: str | None) -> None:
    prefill, decode = group("p", "prefill", tokens=waiting), group("d", "decode", local_tokens=local)
    found = RULE.group(prefill, [decode], ASKED)
    assert (found.group.name if found is not None else None) == expected


def test_the_decode_group_with_the_shortest_queue_is_compared() -> None:
    prefill = group("p", "prefill", tokens=1000)
    decodes = [
        group("full", "decode", local_tokens=30),
        group("unable", "decode", able=False),
        group("short", "decode", tokens=900, local_tokens=10),
    ]
    found = RULE.group(prefill, decodes, ASKED)
    assert found is decodes[2]
    assert RULE.group(prefill, decodes[1:2], ASKED) is None


def test_requests_of_other_routers_count() -> None:
    """Each of four routers has a quarter of the queue."""
    prefill, decode = group("p", "prefill", tokens=30), group("d", "decode")
    assert RULE.group(prefill, [decode], ASKED) is None
    prefill.routers = 4
    assert RULE.group(prefill, [decode], ASKED) is decode
    decode.local_tokens = 15
    assert RULE.group(prefill, [decode], ASKED) is decode
    decode.routers = 4
    assert RULE.group(prefill, [decode], ASKED) is None


def test_a_group_with_many_requests_takes_longer() -> None:
    prefill, decode = group("p", "prefill", tokens=149), group("d", "decode")
    decode.requests = 1000  # whose prompts wait elsewhere
    for answering, expected in ((15, decode), (FEWEST_ANSWERS_PER_PAUSE, None)):
        decode.answering = answering
        assert RULE.group(prefill, [decode], ASKED) is expected


def test_steps_with_prompts_are_as_many_as_answers_and_prompts_allow() -> None:
    """A prompt delays every answer, so with many answers such steps are rare, but not while many prompts wait."""
    steps = [[pauses(running, waiting) for waiting in (1, 2, 4, 9, 71)] for running in (0, 16, 64, 71, 256)]
    assert steps == [[0] * 5, [0] * 5, [2, 2, 2, 1, 0], [2, 2, 2, 1, 0], [8, 8, 8, 6, 6]]
    assert [slowdown(128, running, 1) for running in (0, 96)] == [1.0, 4 * 112 / 96 * 1.5]
    decode = group("d", "decode", local_tokens=8 * 50)
    decode.answering = 64
    for prompts, tokens in ((8, (2940, 2960)), (3, (4440, 4460))):
        decode.local_prompts = prompts
        found = [RULE.group(group("p", "prefill", tokens=one), [decode], ASKED) for one in tokens]
        assert [one is decode for one in found] == [False, True]


def test_of_equal_queues_the_group_with_fewer_requests_is_chosen() -> None:
    prefill = group("p", "prefill", tokens=1000)
    decodes = [group(f"d{number}", "decode") for number in range(3)]
    for number in range(9):
        found = RULE.group(prefill, decodes, ASKED)
        assert found is decodes[number % 3]
        found.requests += 1


def test_without_a_prefill_group_any_queue_will_do() -> None:
    decode = group("d", "decode", local_tokens=10**9)
    assert RULE.group(None, [decode], ASKED) is decode
    assert RULE.group(None, [decode], RoutingRequest(50)) is None
    assert RULE.group(None, [group("d", "decode", able=False)], ASKED) is None


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(n=2, temperature=1.0),
        SamplingParams(beams=2),
        SamplingParams(prompt_logprobs=0),
        SamplingParams(grammar="{}"),
    ],
)
def test_some_requests_need_a_prefill_group(sampling: SamplingParams) -> None:
    assert computes_locally(SamplingParams())
    assert not computes_locally(sampling)


def test_a_prompt_counts_in_the_queue_until_it_is_computed() -> None:
    decode = group("d", "decode")
    loads = [SessionLoad(decode, decode, 1, {decode: tokens}) for tokens in (50, 7)]
    for load in loads:
        load.begin()
    assert (decode.requests, decode.tokens, decode.local_tokens) == (2, 57, 57)
    assert (decode.local_prompts, decode.answering) == (2, 0)
    for _ in range(2):
        loads[0].prompt_computed()
        assert (decode.requests, decode.tokens, decode.local_tokens) == (2, 57, 7)
        assert (decode.local_prompts, decode.answering) == (1, 1)
    for load in loads:
        load.end()
    assert (decode.requests, decode.tokens, decode.local_tokens) == (0, 0, 0)
    assert (decode.local_prompts, decode.answering) == (0, 0)


@pytest.mark.parametrize(("prefill", "decode"), [("prefill", "decode"), ("colocated", "colocated")])
def test_other_requests_are_no_part_of_that_queue(prefill: str, decode: str) -> None:
    there = group("d", decode)
    here = there if prefill == decode else group("p", prefill)
    load = SessionLoad(here, there, 1, {here: 5, there: 5})
    load.begin()
    assert (here.local_tokens, there.local_tokens) == (0, 0)
    load.end()
    assert (here.local_tokens, there.local_tokens) == (0, 0)


def hold(engine: RoutedGroup, hashes: list[int]) -> None:
    engine.held.apply(Digest(None, 1, 16, pack_block_hashes(hashes), pack_block_hashes([])))


@pytest.mark.parametrize(
    ("tokens", "tail_tokens"),
    [(0, 0), (199, 0), (200, 72), (256, 128), (1000, 488), (4096, 2048), (10000, 2000)],
)
def test_a_long_prompt_is_divided_at_whole_tiles(tokens: int, tail_tokens: int) -> None:
    """In the middle, but the tail is at most one step."""
    prefill, decode = group("p", "prefill"), group("d", "decode")
    rule, request = SplitPrompts(200), RoutingRequest(tokens, may_be_local=True)
    assert rule.tail_tokens(prefill, decode, request) == tail_tokens
    assert (tokens - tail_tokens) % 64 == 0 or tail_tokens == 0


def test_a_prompt_is_not_divided_beside_others_or_where_it_may_not_be() -> None:
    rule, request = SplitPrompts(200), RoutingRequest(1000, may_be_local=True)
    prefill, decode, unable = group("p", "prefill"), group("d", "decode"), group("d", "decode", able=False)
    assert rule.tail_tokens(prefill, decode, request)
    assert rule.tail_tokens(prefill, unable, request) == 0
    assert rule.tail_tokens(decode, decode, request) == 0, "one group has both roles"
    assert rule.tail_tokens(prefill, decode, RoutingRequest(1000)) == 0
    assert SplitPrompts(0).tail_tokens(prefill, decode, request) == 0, "switched off"
    for busy in (prefill, decode):
        busy.requests = 1
        assert rule.tail_tokens(prefill, decode, request) == 0
        busy.requests, busy.others_use = 0, True
        assert rule.tail_tokens(prefill, decode, request) == 0, "another router has requests there"
        busy.others_use = False


def test_a_prompt_that_is_computed_soon_is_not_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "SHORT_S", 0.1)
    rule, request = SplitPrompts(200), RoutingRequest(1000, may_be_local=True)
    prefill, decode = group("p", "prefill"), group("d", "decode")
    prefill.prompt_tokens_per_s = 9_999.0
    assert rule.tail_tokens(prefill, decode, request) > 0
    prefill.prompt_tokens_per_s = 10_001.0
    assert rule.tail_tokens(prefill, decode, request) == 0


def test_an_idle_decode_group_that_has_cached_nearly_all_computes_the_rest() -> None:
    hashes = PrefixKey.of(range(3000)).block_hashes(16)
    request = RoutingRequest(3000, may_be_local=True, block_hashes={(16, 0): hashes})
    prefill, decode, other = group("p", "prefill"), group("d", "decode"), group("e", "decode")
    assert RULE.holder(prefill, [decode, other], request) is None, "nobody has cached any of it"
    hold(other, hashes[:180])  # 120 tokens are missing
    assert RULE.holder(prefill, [decode, other], request) is other
    assert RULE.holder(prefill, [decode], request) is None
    other.requests = 1
    assert RULE.holder(prefill, [decode, other], request) is None, "its answers would wait"
    other.requests, other.others_use = 0, True
    assert RULE.holder(prefill, [decode, other], request) is None, "another router's answers would wait"
    other.others_use = False
    hold(prefill, hashes[:172])  # 248 tokens are missing: more than twice as many
    assert RULE.holder(prefill, [decode, other], request) is other
    hold(prefill, hashes[:173])
    assert RULE.holder(prefill, [decode, other], request) is None
    hold(prefill, hashes[:1])
    hold(other, hashes[:123])  # 1,032 tokens are missing, and 4 steps have 1,024
    assert RULE.holder(prefill, [decode, other], request) is None
    hold(other, hashes[:124])
    assert RULE.holder(prefill, [decode, other], request) is other
    assert (
        RULE.holder(prefill, [decode, other], RoutingRequest(3000, block_hashes=request.block_hashes)) is None
    )


def test_a_report_that_counts_this_router_names_no_other_one() -> None:
    """A report may be older than the end of this router's last request."""
    used = group("d", "decode")
    used.requests, used.served = 1, 1
    used.reported(1)
    assert not used.others_use, "this router's request runs"
    used.requests = 0
    used.reported(1)
    assert not used.others_use, "it ran at the report before"
    used.reported(1)
    assert used.others_use, "this router had none since the report before"
    used.served = 2
    used.reported(1)
    assert not used.others_use, "it had one in between"
    used.reported(2)
    assert (used.others_use, used.routers) == (True, 2)
    used.reported(0)
    assert (used.others_use, used.routers) == (False, 1)


def test_a_prompt_that_the_decode_group_has_cached_is_not_divided() -> None:
    prefill, decode = group("p", "prefill"), group("d", "decode")
    tokens = list(range(1000))
    hashes = PrefixKey.of(tokens).block_hashes(16)
    request = RoutingRequest(1000, may_be_local=True, block_hashes={(16, 0): hashes})
    rule = SplitPrompts(200)
    tail_tokens = rule.tail_tokens(prefill, decode, request)
    assert tail_tokens == 488
    hold(prefill, hashes[:20])
    assert 0 < rule.tail_tokens(prefill, decode, request) < tail_tokens
    hold(decode, hashes[:20])
    assert rule.tail_tokens(prefill, decode, request) > 0
    hold(decode, hashes[:40])
    assert rule.tail_tokens(prefill, decode, request) == 0
