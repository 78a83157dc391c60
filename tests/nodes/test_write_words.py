"""Completion words in orders of events in which a report could be lost, counted twice, or come from a lost writer."""

from __future__ import annotations

from collections import deque

import pytest
from interleaved_runs import with_words
from local_groups import small_config
from ordered_simulation import D, Ordered, P
from simulated_groups import LOST, ROUTER

from transport.tags import is_active_message


@pytest.fixture
def layer_groups() -> int:
    return 1


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch, layer_groups: int) -> Ordered:
    """One rank on each side, linked; writes are reported by completion words."""
    config = with_words(small_config(1, 1, chunk_tokens=64, layer_groups=layer_groups))
    simulation = Ordered(config, 0, monkeypatch)
    monkeypatch.setattr(simulation.choose, "random", lambda: 1.0)  # no rank blocks unless a test says so
    simulation.deliver(D, P)
    simulation.deliver(P, D)
    return simulation


def write(words: Ordered) -> None:
    """The device of the prefill rank runs all that is queued."""
    while words.devices[P].work:
        words.devices[P].step()


def reported(words: Ordered) -> int:
    """Number of writes that were reported by a word alone."""
    return int(words.ranks[P].statistics()["transfer"].segments_reported)


def landed(words: Ordered) -> int:
    return int(words.ranks[D].agent.statistics().segments_landed)


def test_a_word_reports_a_write_without_a_message(words: Ordered) -> None:
    words.reserve()
    words.compute()
    words.wire(D)
    assert landed(words) == 0, "the device has not written yet"
    write(words)
    words.wire(D)
    assert landed(words) == 1, "before the prefill rank looks"
    words.wire(P)
    assert reported(words) == 1
    assert words.ranks[D].transport.statistics().pending == 0
    words.settle()
    assert words.request.ended == "done"  # type: ignore[attr-defined]


@pytest.mark.parametrize("layer_groups", [2])
def test_a_write_that_is_reported_twice_counts_once(words: Ordered) -> None:
    """The decode rank is about to block: the prefill rank sends a notification too."""
    words.reserve()
    words.compute()
    agent = words.ranks[D].agent
    while agent.may_block():  # until the first of two writes is reported
        words.devices[P].step()
    words.wire(P)
    for _ in range(3):
        words.wire(D)
        assert landed(words) == 1
    assert words.ranks[D].transport.statistics().pending == 0
    write(words)
    words.settle()
    assert (landed(words), reported(words)) == (2, 1)
    assert words.request.ended == "done"  # type: ignore[attr-defined]


def test_a_notification_that_fails_costs_nothing_once_a_word_has_reported_the_write(words: Ordered) -> None:
    words.fabric.faults.fail_send(0, lambda source, destination, tag: not is_active_message(tag))
    words.reserve()
    words.compute()
    assert words.ranks[D].agent.may_block()
    write(words)
    for _ in range(2):
        words.wire(P)
    assert (words.ranks[P].agent.tickets.failed, reported(words)) == (0, 0)
    words.settle()
    assert words.request.ended == "done"  # type: ignore[attr-defined]


def test_a_notification_that_is_not_received_costs_nothing_once_a_word_has_reported_the_write(
    words: Ordered,
) -> None:
    words.fabric.faults.truncate(3, when=lambda source, destination, tag: not is_active_message(tag))
    words.reserve()
    words.compute()
    agent = words.ranks[D].agent
    assert agent.may_block()
    write(words)
    words.wire(P)  # sends a notification too, since the decode rank blocks
    words.wire(D)
    assert words.fabric.faults.all_struck
    words.settle()
    assert (landed(words), agent.statistics().tickets, agent.status().faults_total) == (1, 0, 0)
    assert words.request.ended == "done"  # type: ignore[attr-defined]


def test_a_rank_does_not_block_before_a_word_that_it_has_not_read(words: Ordered) -> None:
    words.reserve()
    words.compute()
    write(words)
    assert not words.ranks[D].agent.may_block()
    words.wire(D)
    assert landed(words) == 1
    assert words.ranks[D].agent.may_block()


def test_a_word_of_a_lost_writer_is_void(words: Ordered) -> None:
    """Its device still stores, into a board that nobody reads; the pages stay barred."""
    words.reserve()
    words.compute()
    words.queues[P, D] = deque([LOST])
    words.deliver(P, D)
    write(words)
    words.wire(D)
    agent = words.ranks[D].agent
    assert (landed(words), agent.statistics().tickets) == (0, 1)
    assert words.ranks[D].runner.pool.buffer.isnan().all(), "the fence was closed"
    agent.check()


def test_a_lost_writer_that_is_linked_again_has_a_new_board(words: Ordered) -> None:
    """A store that was queued before the loss is no report of a later write."""
    words.reserve()
    words.compute()
    for source, destination in ((P, D), (D, P)):
        words.queues[source, destination] = deque([LOST])
        words.deliver(source, destination)
    words.router.end(words.request, "peer_lost")
    for name, other in ((D, 0), (P, 1)):
        words.ranks[name].link(words.groups[other])
    words.deliver(D, P)
    words.deliver(P, D)
    for name in (D, P):
        words.deliver(ROUTER, name)
    words.reserve()
    words.compute()
    write(words)  # of both requests
    words.wire(D)
    first, second = words.ranks[D].agent.parts.tickets.open.values()
    assert (first.landed_bytes, second.wanted) == (0, False), "the second request has landed"
    segments = landed(words)
    words.settle()
    assert reported(words) == segments
