"""An attempt of a request takes over row, pages and landed KV of an earlier one in the same decode group."""

from __future__ import annotations

from typing import Any

import pytest
from lone_leaders import link_prefill, lone_decode_leader, scheduler_of

from decode_node.admitting_leader import CLAIM_S
from decode_node.request import DecodeRequest, Residency
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.chunks import PromptChunks
from transport.control import messages as m

OLD, NEW = RequestKey("r", 0), RequestKey("r", 1)
ROUTER = "router"
PROMPT_TOKENS = 40


class Decode:
    """A leader whose ranks and router are the test."""

    def __init__(self, ranks: int = 1, pool_tokens: int = 256) -> None:
        self.now_s = 0.0
        self.sent: list[Any] = []
        self.ranks = ranks
        self.leader = lone_decode_leader(
            lambda peer, message: self.sent.append(message),
            lambda: self.now_s,
            ranks=ranks,
            pool_tokens=pool_tokens,
            max_waiting=8,
            chunks=PromptChunks(4),
            preemption="recompute",
        )
        link_prefill(self.leader, "prefill-2")
        self.scheduler = scheduler_of(self.leader)

    def handle(self, message: m.Message) -> None:
        self.leader.handle(ROUTER, message)
        self.leader.check()

    def reserve(self, key: RequestKey, after: RequestKey | None = None) -> DecodeRequest | None:
        sampling = SamplingParams(max_tokens=8, ignore_eos=True)
        prompt, group = pack_tokens(range(1, PROMPT_TOKENS + 1)), "prefill-2" if after else "prefill"
        self.handle(m.Reserve(key, prompt, sampling, 60.0, group, after=after))
        return self.scheduler.requests.get(key)

    def first(self) -> int:
        """Reserves the first attempt; returns the number of its ticket."""
        request = self.reserve(OLD)
        assert request is not None
        return request.ticket.number

    def fail(self, ticket: int, rank: int = 0) -> None:
        self.handle(m.RankFailed(OLD, ticket, rank, "peer_lost", "lost prefill rank 0"))

    def closed(self, ticket: int, landed_tokens: int) -> None:
        for rank in range(self.ranks):
            self.handle(m.RankClosed(OLD, ticket, rank, landed_tokens))

    def begins_at(self) -> int:
        return self.scheduler.requests[NEW].ticket.tokens.start


@pytest.mark.parametrize("order", ["claimed, then closed", "closed, then claimed"])
def test_landed_pages_pass_to_the_next_attempt(order: str) -> None:
    decode = Decode(ranks=2)
    ticket = decode.first()
    row = decode.scheduler.requests[OLD].ticket.row
    decode.fail(ticket)
    assert [one.resumable for one in decode.sent if isinstance(one, m.Failed)] == [True]
    if order == "claimed, then closed":
        decode.reserve(NEW, after=OLD)
        decode.closed(ticket, 30)
    else:
        decode.closed(ticket, 30)
        decode.reserve(NEW, after=OLD)
    assert decode.begins_at() == 28, "whole pages of 4 tokens"
    assert decode.scheduler.requests[NEW].ticket.row == row
    assert OLD not in decode.scheduler.requests
    decode.handle(m.Release(OLD, "over"))
    assert [one.key for one in decode.sent if isinstance(one, m.Released)] == [OLD]


def test_further_reports_of_the_same_death_do_not_end_the_hold() -> None:
    """Each rank reports it, and the leader loses the prefill leader itself."""
    decode = Decode(ranks=2)
    ticket = decode.first()
    decode.fail(ticket)
    decode.fail(ticket, rank=1)
    decode.leader.on_peer_lost("prefill-0")
    decode.closed(ticket, 36)
    assert OLD in decode.scheduler.requests
    decode.reserve(NEW, after=OLD)
    assert decode.begins_at() == 36


def test_the_router_ends_the_hold() -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.closed(ticket, 36)
    assert OLD in decode.scheduler.requests
    decode.handle(m.Release(OLD, "over"))
    assert not decode.scheduler.requests
    assert [one.key for one in decode.sent if isinstance(one, m.Released)] == [OLD]


@pytest.mark.parametrize("end", ["deadline", "router lost"])
def test_a_hold_ends_with_its_router_or_its_deadline(end: str) -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.closed(ticket, 36)
    if end == "deadline":
        decode.now_s = 61.0
        decode.leader.next_plan()
    else:
        decode.leader.on_peer_lost(ROUTER)
    assert not decode.scheduler.requests
    decode.leader.check()


def test_a_repeated_claim_changes_nothing() -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.reserve(NEW, after=OLD)
    decode.reserve(NEW, after=OLD)
    decode.closed(ticket, 36)
    assert decode.begins_at() == 36
    decode.reserve(NEW, after=OLD)
    decode.leader.check()


def test_a_claim_that_is_released_early_frees_both() -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.reserve(NEW, after=OLD)
    decode.handle(m.Release(NEW, "over"))
    decode.handle(m.Release(OLD, "over"))
    decode.closed(ticket, 36)
    assert not decode.scheduler.requests
    assert sorted(one.key for one in decode.sent if isinstance(one, m.Released)) == [OLD, NEW]


def test_an_attempt_does_not_wait_long_for_pages_that_a_lost_writer_may_write() -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.reserve(NEW, after=OLD)
    assert NEW not in decode.scheduler.requests
    decode.now_s = 2 * CLAIM_S
    decode.leader.next_plan()
    assert decode.begins_at() == 0
    decode.handle(m.Release(OLD, "over"))
    decode.closed(ticket, 36)
    assert list(decode.scheduler.requests) == [NEW]
    decode.leader.check()


def test_a_preempted_request_passes_no_pages_on() -> None:
    """Its new pages lack KV until it is recomputed."""
    decode = Decode(pool_tokens=64)
    ticket = decode.first()
    for message in (m.RankOpened(OLD, ticket, 0), m.Landed(OLD, ticket, 0), m.FirstTokens(OLD, ticket, [1])):
        decode.handle(message)
    request = decode.scheduler.requests[OLD]
    decode.scheduler.preemptor.preempt(request)
    plan = decode.scheduler.next_step()
    assert plan is not None
    assert request.residency is Residency.RESIDENT
    decode.scheduler.commit(plan)
    decode.reserve(NEW, after=OLD)
    decode.closed(ticket, PROMPT_TOKENS)
    assert decode.begins_at() == 0, "no logits have shown that the recomputed page is valid"


def test_a_broken_group_fails_the_claim() -> None:
    decode = Decode()
    ticket = decode.first()
    decode.fail(ticket)
    decode.reserve(NEW, after=OLD)
    decode.leader.break_group("a step failed")
    assert [one.key for one in decode.sent if isinstance(one, m.Failed)] == [OLD, NEW]
