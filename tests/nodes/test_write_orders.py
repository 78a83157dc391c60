"""Orders of events in which a page could be written after it was given back, or a ticket never end: one by one."""

from __future__ import annotations

import math
from collections import deque

import pytest
from bit_flips import install
from local_groups import small_config
from ordered_simulation import TOKENS, D, Ordered, P
from simulated_groups import LOST, ROUTER

from decode_node.fences import CLOSED
from decode_node.receive_state import ReceiveTransferState
from decode_node.receiver import ARRIVAL_POLL_S
from decode_node.tickets import VERIFIED_WAIT_S
from disagg.core.errors import TransportError
from disagg.core.types import RequestKey, SamplingParams
from transport.control import messages as m


def test_a_ticket_is_stopped_before_its_writer_has_heard_of_it(order: Ordered) -> None:
    """The answer 'unknown ticket' is on its way while the writer gets the request and launches."""
    order.reserve()
    order.router.end(order.request, "aborted")
    order.deliver(ROUTER, D)
    order.deliver(D, P)
    assert [type(message) for message in order.queues[P, D]] == [m.SenderEnded]
    order.compute()
    order.devices[P].step()  # has read the fence word
    order.deliver(P, D)
    assert not list(order.ranks[D].leader.scheduler.requests), "the pages were given back"
    order.devices[P].step()
    assert order.ranks[D].runner.pool.buffer.isnan().all(), "a page was written after it was given back"
    order.settle()


def test_a_writer_that_was_taken_for_dead_cannot_begin_any_more(order: Ordered) -> None:
    """However long it was stopped: what it launches when it goes on finds the fence closed."""
    order.reserve()
    order.queues[P, D] = deque([LOST])
    order.deliver(P, D)
    words = order.ranks[D].agent.parts.writes.fences.words
    assert (words == CLOSED).all()
    order.compute()
    while order.devices[P].work:
        order.devices[P].step()
    assert order.ranks[D].runner.pool.buffer.isnan().all()


def test_a_notification_from_before_its_writer_was_lost_is_void(order: Ordered) -> None:
    """The fence has ended all receives from that peer; nothing would end a later one."""
    order.reserve()
    order.compute()
    while order.devices[P].work:
        order.devices[P].step()
    order.work(P)
    order.wire(P)  # the notification leaves
    (arrival,) = order.ranks[D].transport.arrivals()
    order.queues[P, D] = deque([LOST])
    order.deliver(P, D)
    agent = order.ranks[D].agent
    stale = agent.statistics().stale
    agent.on_arrival(arrival)
    order.wire(D)
    assert agent.statistics().stale == stale + 1
    assert agent.statistics().segments_landed == 0
    agent.check()


def test_a_pool_that_is_offered_again_and_refused_leaves_open_tickets_as_they_are(order: Ordered) -> None:
    """They go on by writes: whoever gives up their pages must still wait for them."""
    order.reserve()
    order.compute()
    order.refuses = True
    decode = order.ranks[D]
    decode.link(order.groups[0])
    order.deliver(D, P)
    order.deliver(P, D)
    assert order.ranks[P].statistics()["transfer"].refused_pools == 1
    while order.devices[P].work:
        order.devices[P].step()
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]
    assert (decode.agent.parts.writes.fences.words == CLOSED).all()


@pytest.mark.parametrize("error", [TransportError("no"), RuntimeError("the kernel does not compile")])
def test_a_pool_that_cannot_be_used_is_refused(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Whatever stands in the way: KV goes through the ring."""

    def fail(*arguments: object) -> None:
        raise error

    monkeypatch.setattr("prefill_node.peer_pools.warm", fail)
    order = Ordered(small_config(1, 1, peer_memory=True), 0, monkeypatch)
    order.deliver(D, P)
    statistics = order.ranks[P].statistics()["transfer"]
    assert (statistics.open_pools, statistics.refused_pools) == (0, 1)
    order.router.submit(TOKENS, SamplingParams(max_tokens=1))
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]
    assert order.ranks[P].statistics()["transfer"].segments_written == 0


def test_a_receiver_does_not_poll_for_a_request_that_is_over(order: Ordered) -> None:
    """Pages of a lost writer are barred for many seconds: nothing arrives for them that anyone waits for."""
    agent = order.ranks[D].agent
    agent.polls = True  # as on a GPU
    order.reserve()
    assert agent.poll(order.now_s) == ARRIVAL_POLL_S
    order.queues[P, D] = deque([LOST])
    order.deliver(P, D)
    order.router.end(order.request, "peer_lost")
    order.deliver(ROUTER, D)
    assert agent.statistics().tickets == 1, "its pages are barred"
    assert agent.poll(order.now_s) > ARRIVAL_POLL_S


@pytest.mark.parametrize("damaged", [False, True])
def test_the_prefill_group_keeps_its_pages_until_all_is_verified(
    order: Ordered, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    """Not only until all is written: a damaged segment is written once more, out of these pages."""
    flips = install(monkeypatch, lambda incoming, segment, again: 5 if damaged and not again else None)
    order.damages = True
    order.reserve()
    order.compute()

    def run_device(name: str) -> None:
        while order.devices[name].work:
            order.devices[name].step()

    def sending() -> int:
        return order.ranks[P].statistics()["leader"].sending

    for _ in range(2 if damaged else 1):
        run_device(P)
        order.wire(P)  # the completion notification leaves
        order.wire(D)
        order.wire(D)  # and is read: the sum is launched
        order.wire(P)
        assert order.ranks[P].agent.tickets.staged() == 0
        assert sending() == 1, "all is written, nothing is verified"
        run_device(D)
        order.wire(D)
        order.deliver(D, P)  # it asks for a segment again
        for _ in range(2):
            order.wire(P)  # or has verified all: a message comes
    assert len(flips.struck) == damaged
    assert sending() == 0
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]


def test_a_verified_ticket_waits_a_moment_for_others(order: Ordered) -> None:
    """One message covers several tickets. Only while more is expected, and not for long."""
    order.reserve()
    order.compute()
    order.reserve()  # expected by the decode rank; the prefill group has not heard of it
    tickets = order.ranks[D].agent.parts.tickets
    (first, second) = tickets.open.values()
    while first.state is not ReceiveTransferState.LANDED:
        for name in (P, D):
            while order.devices[name].work:
                order.devices[name].step()
            order.wire(name)
    assert second.wanted
    landed_s = order.now_s
    (outgoing,) = order.ranks[P].agent.tickets.open.values()
    assert tickets.due_s > landed_s - VERIFIED_WAIT_S, "it waits"
    assert not verified_tickets(order)
    while not outgoing.reported:
        order.wire(D)
        order.wire(P)
    assert verified_tickets(order) == [[(first.key, first.ticket.number)]]
    assert order.now_s - landed_s < VERIFIED_WAIT_S + 0.005, "not for the other one"
    order.settle()
    assert len(verified_tickets(order)) == 2
    assert tickets.due_s == math.inf


def verified_tickets(order: Ordered) -> list[list[tuple[RequestKey, int]]]:
    return [message.tickets for message in order.seen if isinstance(message, m.TransferVerified)]


def test_pages_that_were_given_back_are_not_sent_again(order: Ordered) -> None:
    """All was verified: what asks for a segment now is in error, and the pages may be another request's."""
    order.reserve()
    order.compute()
    agent = order.ranks[P].agent
    (outgoing,) = agent.tickets.open.values()
    while not outgoing.reported:
        for name in (P, D):
            while order.devices[name].work:
                order.devices[name].step()
            order.wire(name)
    (item,) = outgoing.items.values()
    agent.on_send_again(item.peer, m.SendAgain(outgoing.key, outgoing.ticket.number, 0, item.segment.index))
    assert agent.statistics().segments_sent_again == 0
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]


@pytest.mark.parametrize("also", ["", "before", "after"])
def test_a_prefill_group_without_its_router_sends_to_the_end(order: Ordered, also: str) -> None:
    """However long that takes; then nothing is kept. The decode group stops it when it loses the router too."""
    order.reserve()
    order.compute()
    prefill, decode = order.ranks[P], order.ranks[D]

    def lose_both() -> None:
        decode.leader.on_peer_lost(ROUTER)
        order.work(D)
        order.deliver(D, P)

    if also == "before":
        lose_both()
    prefill.leader.on_peer_lost(ROUTER)
    order.now_s += 20.0
    prefill.leader.expire()
    order.work(P)
    if not also:
        assert not any(request.closing for request in prefill.leader.scheduler.requests.values())
    elif also == "after":
        lose_both()
    for _ in range(8):
        while order.devices[P].work:
            order.devices[P].step()
        order.wire(P)
        order.wire(D)
        while order.devices[D].work:
            order.devices[D].step()
        order.work(P)
    assert not list(prefill.leader.scheduler.requests), "the router cannot release it"
    assert prefill.agent.statistics().segments_written
    assert (not also) == (decode.agent.statistics().segments_landed > 0)
    if also:
        order.router.end(order.request, "peer_lost")
    order.settle()
