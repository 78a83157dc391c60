"""Aborts at every step of a hand-over, deaths and late requests: every block is freed, and no block is used late."""

from __future__ import annotations

import pytest
from fake_vllm import (
    LEASE_S,
    FakeEngine,
    asks_decode,
    asks_prefill,
    full_and,
    full_and_states,
)
from hand_overs import TOKENS, HandOver

from disagg.vllm.groups import CacheGroup

GROUPS = [(), full_and(20), full_and_states(16)]
FIRST = [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 70))]
"""Each value is a sample of the steps of a hand-over, which has 80 to 280; together they are all of them."""


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("both_at_once", [False, True])
@pytest.mark.parametrize("who", ["p", "d", "both"])
@pytest.mark.parametrize("groups", GROUPS)
def test_aborts_at_every_step(
    groups: tuple[CacheGroup, ...], who: str, both_at_once: bool, first: int
) -> None:
    for steps in range(first, 280, 70):
        with pytest.MonkeyPatch.context() as patch:
            abort_after(hand_over(steps, groups, both_at_once, patch), steps, who)


def hand_over(
    steps: int, groups: tuple[CacheGroup, ...], both_at_once: bool, patch: pytest.MonkeyPatch
) -> HandOver:
    tp = {"p": 1 + steps % 2, "d": 1 + steps // 2 % 2}
    return HandOver(steps, both_at_once=both_at_once, patch=patch, groups=groups, **tp)


def abort_after(run: HandOver, steps: int, who: str) -> None:
    for _ in range(steps):
        run.step()
    if who != "d":
        run.p.abort(run.first)
    if who != "p" and run.second is not None:
        run.d.abort(run.second)
    run.end()


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("both_at_once", [False, True])
@pytest.mark.parametrize("who", ["p", "d"])
@pytest.mark.parametrize("groups", GROUPS)
def test_deaths_at_every_step(
    groups: tuple[CacheGroup, ...], who: str, both_at_once: bool, first: int
) -> None:
    """A dead producer's prompt is computed by the consumer; a dead consumer's blocks are freed by the producer."""
    for steps in range(first, 280, 70):
        with pytest.MonkeyPatch.context() as patch:
            run = hand_over(steps, groups, both_at_once, patch)
            for _ in range(steps):
                run.step()
            (run.p if who == "p" else run.d).kill()
            run.end()
        if who == "p" and run.second is not None:
            assert run.second.finished
            assert run.second.landed or run.second.recomputed


def test_a_request_that_never_comes() -> None:
    """The producer holds the blocks until the lease ends; a consumer that comes later computes the prompt itself."""
    run = HandOver(0, both_at_once=False)
    while not run.first.finished:
        run.p.step()
    run.p.step()
    run.network.settle()  # the lease begins with the step after the last
    held = len(run.p.free)
    run.network.now_s += LEASE_S - 1
    run.network.settle()
    run.p.step()
    assert len(run.p.free) == held
    assert run.p.scheduler.has_pending_push_work()
    run.network.now_s += 2
    run.network.settle()
    run.p.step()
    assert len(run.p.free) > held
    assert not run.p.scheduler.has_pending_push_work()
    late = run.d.submit(asks_decode("d1", run.first))
    run.d.step()
    run.network.settle()
    run.d.step()
    run.network.settle()
    for _ in range(5):
        run.d.step()
    assert late.recomputed  # reported at once, not after another lease
    run.end()


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("both_at_once", [False, True])
def test_the_producer_of_an_aborted_consumer_waits_for_no_lease(both_at_once: bool, checksum: bool) -> None:
    for steps in range(60, 340, 28):
        with pytest.MonkeyPatch.context() as patch:
            tp = {"p": 2, "d": 1 + steps // 28 % 2}
            run = HandOver(steps, both_at_once=both_at_once, patch=patch, checksum=checksum, **tp)
            for _ in range(steps):
                run.step()
            if run.second is None:
                continue
            run.d.abort(run.second)
            for _ in range(5):
                run.d.step()
                run.p.step()
                run.network.settle()
            run.p.step()
            run.d.step()
            run.p.check_empty()
            run.d.check_empty()


def test_a_worker_that_has_sent_all_does_not_wait_for_a_slow_one() -> None:
    """The consumer aborts when one worker has sent its part: nobody verifies the checksums of that part any more."""
    run = HandOver(2, both_at_once=False, checksum=True, p=2)
    for _ in range(500):
        run.step()
    assert run.second is not None
    assert run.second.landed  # the engines are linked
    fast, slow = (worker.producing for worker in run.p.workers)
    first = run.p.submit(asks_prefill("p2", 4, TOKENS))
    while not first.finished:
        run.p.step()
    second = run.d.submit(asks_decode("d2", first))
    del run.network.endpoints[slow.endpoint.wires.control.address]
    for engine in (run.p, run.d):
        engine.step()
        run.network.settle()
    assert fast.endpoint.agent.statistics().under_way == 0
    assert fast.statistics().prompts == 1
    run.d.abort(second)
    run.d.step()
    run.network.settle()
    assert fast.statistics().prompts == 0
    run.network.endpoints[slow.endpoint.wires.control.address] = slow.endpoint
    run.end()


def test_an_abort_before_the_engines_are_linked() -> None:
    """The producer frees its blocks when the link is there, not after its lease."""
    run = HandOver(0, both_at_once=False)
    while not run.first.finished:
        run.p.step()
    run.second = run.d.submit(asks_decode("d1", run.first))
    run.d.step()
    run.d.abort(run.second)
    run.d.step()
    for endpoint in run.d.workers[0].endpoints:
        run.network.run(endpoint)  # before the producer has answered
    for _ in range(2):
        run.network.settle()
        run.p.step()
        run.d.step()
    run.p.check_empty()
    run.d.check_empty()


def test_a_producer_that_never_computes() -> None:
    """The consumer waits for one lease."""
    run = HandOver(0, both_at_once=True)
    run.p.abort(run.first)
    run.d.step()
    run.network.settle()
    run.d.step()
    assert run.second is not None
    assert run.second.status.name == "WAITING_FOR_REMOTE_KVS"
    run.end()
    assert run.second.recomputed


@pytest.mark.parametrize("side", ["p", "d"])
def test_a_broken_connection_is_linked_again(side: str) -> None:
    """The connection between two live workers breaks: requests fail, or land, and later ones land."""
    for steps in range(0, 280, 56):
        run = HandOver(steps, both_at_once=False)
        for _ in range(steps):
            run.step()
        p, d = (engine.workers[0].endpoints for engine in (run.p, run.d))
        names = [p[0].wires.control.address, d[1].wires.control.address]
        run.network.fabric.sever(*(names if side == "p" else names[::-1]))
        run.end()
        run.first, run.second = run.p.submit(asks_prefill("p2", 4, TOKENS)), None
        for _ in range(600):
            run.step()
        assert run.second is not None
        assert run.second.landed
        run.end()


def test_a_restarted_engine_is_linked_again() -> None:
    run = HandOver(1, both_at_once=False)
    for _ in range(400):
        run.step()
    assert run.second is not None
    assert run.second.landed
    run.p.kill()
    run.p = FakeEngine(run.network, "p", tp=2)
    run.first, run.second = run.p.submit(asks_prefill("p2", 4, TOKENS)), None
    for _ in range(800):
        run.step()
    assert run.second is not None
    assert run.second.landed
    run.end()
