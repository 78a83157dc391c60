"""Where a prefill rank can open a decode rank's pool, it writes there: the same tokens, the same endings, no ring."""

from __future__ import annotations

import itertools
import math

import pytest
from conditions import until
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    local_groups,
    random_prompts,
    small_config,
    with_quarantine,
)
from slow_parameters import sampled

from disagg.core.errors import RequestTimeoutError, TransportError
from disagg.core.types import SamplingParams
from disagg.router.router import Router
from transport.control import messages as m
from transport.peer_memory import MemoryHandle

TOKENS = 6
SIZES = list(itertools.product((1, 2, 3, 4), repeat=2))
PAGES = list(itertools.product((1, 16, 64), repeat=2))


def written(groups: LocalGroups) -> int:
    return sum(rank.statistics()["transfer"].segments_written for rank in groups.prefill)


def sent(groups: LocalGroups) -> int:
    return sum(rank.statistics()["transfer"].segments_sent for rank in groups.prefill)


def pools_open(groups: LocalGroups) -> bool:
    """Whether each prefill rank has opened the pools of all decode ranks; until then, segments are staged."""
    wanted = len(groups.decode)
    return all(rank.statistics()["transfer"].open_pools == wanted for rank in groups.prefill)


def in_sample(tp: tuple[int, int]) -> bool:
    """Each size of either group once: larger, smaller and equal decode groups."""
    return tp in ((1, 3), (2, 2), (3, 4), (4, 1))


@pytest.mark.parametrize("tp", sampled([(tp,) for tp in SIZES], in_sample), ids=str)
def test_tokens_are_exact_and_nothing_is_staged(checkpoints: Checkpoints, tp: tuple[int, int]) -> None:
    turn = SIZES.index(tp)
    pages, kv_heads = PAGES[turn % len(PAGES)], (1, 2, 4, 6)[turn // 2 % 4]
    source = checkpoints.source("llama", kv_heads, layers=3)
    prompts = random_prompts(5, 61, 29, 90, seed=turn)
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], chunk_tokens=23, peer_memory=True)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
        assert written(groups) == sent(groups) > 0
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@pytest.mark.parametrize(
    ("fault", "kind"),
    sampled(
        itertools.product(["drop", "duplicate"], [m.PoolOffer, m.RankSent, m.StopSending, m.SenderEnded]),
        lambda fault, kind: (fault == "drop") == (kind in (m.PoolOffer, m.StopSending)),
    ),
)
def test_a_message_lost_or_repeated_changes_nothing(
    checkpoints: Checkpoints, kind: type[m.Message], fault: str
) -> None:
    source = checkpoints.source()
    prompts = random_prompts(70, 55, seed=5)
    with local_groups(small_config(2, 2, chunk_tokens=16, peer_memory=True), source) as groups:
        getattr(groups.hub, fault)(kind, 0)
        getattr(groups.hub, fault)(kind, 2)
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def test_a_rank_that_cannot_open_a_pool_goes_through_the_ring(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two refuses: both ways in one request."""
    import prefill_node.peer_pools

    opened: list[MemoryHandle] = []
    open_memory = prefill_node.peer_pools.open_memory

    def sometimes(handle: MemoryHandle, *rest: object) -> object:
        opened.append(handle)
        if len(opened) == 1:
            raise TransportError("it is on another host")
        return open_memory(handle, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("prefill_node.peer_pools.open_memory", sometimes)
    source = checkpoints.source()
    prompts = random_prompts(70, 55, seed=6)
    with local_groups(small_config(2, 1, peer_memory=True), source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
        assert 0 < written(groups) < sent(groups)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@pytest.mark.parametrize(("chunk_tokens", "layer_groups"), [(16, 1), (16, 2), (64, 2)])
def test_there_is_a_notice_for_each_group_and_chunk_and_no_message(
    checkpoints: Checkpoints, chunk_tokens: int, layer_groups: int
) -> None:
    source = checkpoints.source()
    prompt = random_prompts(50, seed=7)[0]
    config = small_config(2, 1, chunk_tokens=chunk_tokens, layer_groups=layer_groups, peer_memory=True)
    with local_groups(config, source) as groups:
        until(lambda: pools_open(groups))
        answer = groups.answers([prompt], SamplingParams(max_tokens=2))[0]
    chunks, pairs = math.ceil(len(prompt) / chunk_tokens), 2
    assert answer.report.segments == chunks * layer_groups * pairs
    assert answer.report.messages == 0


def test_a_notice_that_never_comes_holds_its_request_for_a_while_only(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was promised before its request was ended, and then the wire lost it."""
    from decode_node.writes import PeerWrites
    from prefill_node.tickets import OutgoingTickets
    from transport.base import Arrival
    from transport.tags import unpack

    lost: list[int] = []
    on_notification = PeerWrites.on_notification

    def lose_one(self: PeerWrites, incoming: object, peer: str, arrival: Arrival) -> None:
        if lost:
            on_notification(self, incoming, peer, arrival)  # type: ignore[arg-type]
            return
        lost.append(arrival.tag)
        groups.decode[0].transport.discard(peer, arrival)

    def promise(self: OutgoingTickets, peer: str, message: m.StopSending) -> None:
        index = unpack(lost[0]).segment
        ended = m.SenderEnded(message.key, message.ticket, 0, [index], "it has left")
        groups.prefill[0].control.send(peer, ended)

    monkeypatch.setattr(PeerWrites, "on_notification", lose_one)
    monkeypatch.setattr(OutgoingTickets, "on_stop_sending", promise)
    source = checkpoints.source()
    prompts = random_prompts(70, 55, seed=8)
    config = small_config(1, 1, peer_memory=True)
    config = with_quarantine(config, 0.4)

    async def work(router: Router) -> None:
        with pytest.raises(RequestTimeoutError):
            await ask(router, "victim", prompts[0], SamplingParams(max_tokens=TOKENS), timeout_s=1.0)

    with local_groups(config, source) as groups:
        groups.serve(work)
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
    assert lost
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


@pytest.mark.parametrize("polls", [True, False])
def test_completion_words_report_the_writes(checkpoints: Checkpoints, polls: bool) -> None:
    """A decode rank that polls, as on a GPU, needs no notification unless a step runs."""
    source = checkpoints.source()
    prompts = random_prompts(70, 55, 90, 20, seed=9)
    config = small_config(2, 2, chunk_tokens=16, peer_memory=True, completion_words=True)
    with local_groups(config, source) as groups:
        for rank in groups.decode:
            rank.agent.polls = polls
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
        transfers = [rank.statistics()["transfer"] for rank in groups.prefill]
        assert written(groups) == sent(groups) > 0
        assert not polls or sum(one.segments_reported for one in transfers) > 0
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]


def test_ranks_without_shared_memory_send_notifications(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise TransportError("it cannot be mapped")

    monkeypatch.setattr("prefill_node.boards.OpenBoard", fail)
    source = checkpoints.source()
    prompts = random_prompts(70, 55, seed=10)
    with local_groups(small_config(1, 1, peer_memory=True, completion_words=True), source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS))
        assert written(groups) == sent(groups) > 0
        assert groups.prefill[0].statistics()["transfer"].segments_reported == 0
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, p, TOKENS) for p in prompts]
