"""Prompts that are computed before the decode group has room: what they hold, and that their KV arrives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from ordered_simulation import TOKENS, D, Ordered, P
from simulated_groups import ROUTER

from disagg.core.errors import ProtocolError
from disagg.core.types import SamplingParams, Span
from disagg.node.plan import StepPlan
from prefill_node.request import PrefillRequest
from prefill_node.step_part import Part, PlannedChunk, StepPart
from transport.control import messages as m


def submit(order: Ordered) -> None:
    """The prefill group has the prompt; the decode group has not heard of the request."""
    order.router.submit(TOKENS, SamplingParams(max_tokens=3))
    order.deliver(ROUTER, P)


def ticket(order: Ordered) -> None:
    """The decode group reserves room, and the prefill group gets the ticket."""
    order.deliver(ROUTER, D)
    order.deliver(D, ROUTER)
    order.deliver(ROUTER, P)


def held(order: Ordered) -> PrefillRequest:
    (request,) = order.ranks[P].leader.scheduler.requests.values()
    assert isinstance(request, PrefillRequest)
    return request


def early_chunks(order: Ordered) -> int:
    return len(order.ranks[P].agent.early)


def test_a_prompt_is_computed_before_its_ticket_and_sent_behind_it(order: Ordered) -> None:
    submit(order)
    order.step()
    assert held(order).computed
    assert early_chunks(order) == 1
    assert not order.queues.get((P, ROUTER)), "no group has room"
    ticket(order)
    assert early_chunks(order) == 0
    assert [type(message) for message in order.queues[P, ROUTER]] == [m.Prefilled]
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]
    assert order.ranks[P].agent.statistics().segments_written == 1


def test_an_early_chunk_wakes_the_transfer_thread_when_its_first_layers_are_ready(
    order: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(order)
    posts = wakes_of_posts(order, monkeypatch)
    order.step()
    assert len(posts) > 1
    assert posts == [False, *[True] * (len(posts) - 1)]


def test_a_chunk_planned_before_its_ticket_came_wakes_the_thread_if_the_ticket_is_open(
    order: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs a lease before the step is launched."""
    submit(order)
    plan = order.ranks[P].leader.next_plan()
    assert isinstance(plan, StepPlan)
    assert plan.work[0].early
    ticket(order)
    order.work(P)
    posts = wakes_of_posts(order, monkeypatch)
    order.ranks[P].step(plan)
    assert all(posts)


def wakes_of_posts(order: Ordered, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the transfer thread was woken with or behind each piece of work that is posted from now on."""
    loop, posts = order.ranks[P].transfer_loop, list[bool]()
    post, wake = loop.post, loop.wake

    def posted(work: Callable[[], None], wake: bool = True) -> None:
        posts.append(wake)
        post(work, wake)

    def woken() -> None:
        posts[-1] = True
        wake()

    monkeypatch.setattr(loop, "post", posted)
    monkeypatch.setattr(loop, "wake", woken)
    return posts


@pytest.mark.parametrize("layers", [1, 2])
def test_a_ticket_comes_while_the_step_runs(
    order: Ordered, layers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers are sent at once, the others as they are computed."""
    submit(order)
    computed = 0

    def between_layers() -> None:
        nonlocal computed
        computed += 1
        if computed == layers:
            ticket(order)
            assert early_chunks(order) == 0
            assert not held(order).computed

    monkeypatch.setattr(order, "between_layers", between_layers)
    order.step()
    assert computed >= layers
    assert held(order).computed
    order.settle()
    assert order.request.ended == "done"  # type: ignore[attr-defined]


def test_a_request_ends_without_a_ticket(order: Ordered) -> None:
    submit(order)
    order.step()
    order.router.end(order.request, "aborted")  # type: ignore[arg-type]
    order.deliver(ROUTER, P)
    assert not list(order.ranks[P].leader.scheduler.requests), "nothing is read from its pages"
    order.settle()
    assert early_chunks(order) == 0


def test_a_request_ends_while_it_is_computed(order: Ordered, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pages are in use until the step is over."""
    submit(order)

    def between_layers() -> None:
        order.router.end(order.request, "aborted")  # type: ignore[arg-type]
        order.deliver(ROUTER, P)
        assert held(order).block_table is not None

    monkeypatch.setattr(order, "between_layers", between_layers)
    order.step()
    assert not list(order.ranks[P].leader.scheduler.requests)
    order.settle()
    assert early_chunks(order) == 0


def test_pages_that_were_taken_back_are_not_sent(order: Ordered) -> None:
    """The chunk of the first reservation is still noted when the ticket of the second one opens."""
    submit(order)
    order.step()
    request, scheduler = held(order), order.ranks[P].leader.scheduler
    first = request.reservation
    assert scheduler.take_back()
    assert (request.block_table, request.computed, request.first) == (None, False, None)
    order.deliver(ROUTER, D)
    order.deliver(D, ROUTER)
    order.deliver(ROUTER, P)  # the ticket: reserves again, and opens
    assert request.reservation != first
    assert early_chunks(order) == 1, "the ranks have not heard that the first reservation has ended"
    agent = order.ranks[P].agent
    assert agent.statistics().segments_written == 0
    (outgoing,) = agent.tickets.open.values()
    assert not outgoing.items, "nothing of the new pages is computed"
    late = PlannedChunk(StepPart(1, Part.CHUNK), request.key, first, Span(0, TOKENS), early=True)
    agent.plan_chunk(late)  # of a rank that is behind
    assert not outgoing.items
    order.settle()
    assert early_chunks(order) == 0
    assert order.request.ended == "done"  # type: ignore[attr-defined]


def test_a_router_that_is_lost_ends_an_early_prompt(order: Ordered) -> None:
    submit(order)
    order.step()
    order.ranks[P].leader.on_peer_lost(ROUTER)
    assert not list(order.ranks[P].leader.scheduler.requests), "no ticket will come"
    order.router.end(order.request, "gone")  # type: ignore[arg-type]
    order.settle()


def test_a_ticket_of_an_unknown_decode_group_fails_the_request(order: Ordered) -> None:
    submit(order)
    order.step()
    order.ranks[P].leader.decode_leaders.clear()
    ticket(order)
    (failed,) = [message for message in order.queues[P, ROUTER] if isinstance(message, m.Failed)]
    assert "decode group 'decode' is not linked to this prefill group" in failed.message
    order.settle()
    assert early_chunks(order) == 0


def test_a_plan_without_work_is_no_step(order: Ordered) -> None:
    submit(order)
    order.step()
    order.router.end(order.request, "aborted")  # type: ignore[arg-type]
    order.deliver(ROUTER, P)
    plan = order.ranks[P].leader.next_plan()
    assert isinstance(plan, StepPlan)
    assert not plan.work
    assert [key for key, _ in plan.dropped] == [order.request.session.key]  # type: ignore[attr-defined]
    order.ranks[P].step(plan)
    order.work(P)
    assert early_chunks(order) == 0
    assert order.ranks[P].leader.next_plan() is None


def test_a_ticket_that_is_too_large_for_a_message_ends_the_request(
    order: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first token is not sent behind the failure."""
    submit(order)
    order.step()
    leader = order.ranks[P].leader

    def refuse(message: m.Message) -> None:
        raise ProtocolError("too large")

    monkeypatch.setattr(leader, "_to_others", refuse)
    ticket(order)
    assert [type(message) for message in order.queues[P, ROUTER]] == [m.Failed]
