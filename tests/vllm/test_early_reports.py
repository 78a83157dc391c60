"""Reports of KV that is about to come: each step reads the right KV or is told of the loss, whatever happens then."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
from engine_network import EngineNetwork
from fake_vllm import FakeEngine, FakeRequest, asks_decode, asks_prefill, landed, small_settings
from hand_overs import HandOver

from disagg.core.errors import TransportError
from disagg.vllm.received import ReceivedRequests
from disagg.vllm.unsettled import UnsettledRequests
from disagg.vllm.work import StepWork
from disagg.vllm.worker import REST_LIMIT_S

FIRST = [0, *(pytest.param(first, marks=pytest.mark.slow) for first in range(1, 20))]
"""Each value is a sample of the events of a hand-over; together they are all of them."""


def runs(first: int, often: float = 0.3) -> Iterator[HandOver]:
    """Hand-overs in which the consumer's workers report early, up to the event at which a test does something."""
    for steps in range(first, 300, 20):
        with pytest.MonkeyPatch.context() as patch:
            tp = {"p": 1 + steps % 2, "d": 1 + steps // 2 % 2}
            at_once, checksum = steps // 4 % 3 > 0, steps // 8 % 2 == 0
            run = HandOver(steps, both_at_once=at_once, patch=patch, checksum=checksum, early=often, **tp)
            for _ in range(steps):
                run.step()
            yield run


def second_of(run: HandOver) -> FakeRequest:
    """The consumer's request, after the end."""
    run.end()
    assert run.second is not None
    assert run.second.finished
    return run.second


@pytest.mark.parametrize("first", FIRST)
def test_no_step_reads_kv_that_has_not_come(first: int) -> None:
    """The consumer's workers report at once, and wait in the step that computes the request."""
    waited = 0
    for run in runs(first, often=0.0):
        while not run.first.finished:
            run.p.step()
            run.step()
        for _ in range(300):
            run.d.hurry()
            run.d.step()
            run.step()
        assert second_of(run).landed
        waited += run.d.waited
    assert waited > 3


@pytest.fixture
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that land one after the other are not one group: the network's events take no time."""
    monkeypatch.setattr("decode_node.landing_pace.TOGETHER_S", 0.0)


@pytest.mark.usefixtures("no_time_passes")
def test_layers_that_land_one_after_the_other_predict_the_end() -> None:
    """Workers report early by themselves when two of three layers have landed."""
    network, waited = EngineNetwork(), 0
    settings = small_settings(early_s=0.004, layer_groups=3)
    p, d = (FakeEngine(network, name, settings=settings) for name in "pd")
    choose = random.Random(1)
    landed(network, p, d, 90)
    for number in range(2, 12):
        first = p.submit(asks_prefill(f"p{number}", number, 90))
        while not first.finished:
            p.step()
        second = d.submit(asks_decode(f"d{number}", first))
        while not second.finished:
            if choose.random() < 0.1:
                p.step()
            d.step()
            network.step(choose)
        assert second.landed
        waited, d.waited = waited + d.waited, 0
    assert waited > 3
    for _ in range(4):
        p.step()
        d.step()
        network.settle()
    p.check_empty()
    d.check_empty()


@pytest.mark.usefixtures("no_time_passes")
@pytest.mark.parametrize(("cached", "early"), [(48, 1), (64, 0)])
def test_the_last_token_alone_is_not_reported_early(cached: int, early: int) -> None:
    """vLLM computes this token again, and so would not fail the request if the KV of its block was lost."""
    network, settings = EngineNetwork(), small_settings(early_s=0.004, layer_groups=3)
    p, d = (FakeEngine(network, name, settings=settings) for name in "pd")
    first = p.submit(asks_prefill("p1", 5, 65))
    while not first.finished:
        p.step()
    second = asks_decode("d1", first)
    second.cached = cached
    d.submit(second)
    choose = random.Random(2)
    while not second.finished:
        p.step()
        d.step()
        network.step(choose)
    for _ in range(4):
        network.settle()
        d.step()
    assert second.landed
    assert d.workers[0].consuming.received.early == early
    d.check_empty()


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("who", ["p", "d", "both"])
def test_aborts(who: str, first: int) -> None:
    for run in runs(first):
        if who != "d":
            run.p.abort(run.first)
        if who != "p" and run.second is not None:
            run.d.abort(run.second)
        run.end()
        if run.second is not None:
            assert run.second.finished


@pytest.mark.parametrize("first", FIRST)
def test_a_client_leaves_after_each_early_report(first: int) -> None:
    """vLLM takes the request for received and would free its blocks at once, while its KV still comes."""
    held = 0
    for run in runs(first, often=0.0):
        for _ in range(100):
            run.d.hurry()
            run.d.step()
            if run.d.finished_recving:  # the next step would compute the request
                assert run.second is not None
                run.d.abort(run.second)
                held += "d1" in run.d.requests
                break
            run.step()
        run.end()
    assert held > 3


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("patience", [0, 1000])
def test_a_producer_dies(patience: int, first: int) -> None:
    """The request fails, whether or not the consumer hears of the death before its step has waited long enough."""
    ends = Counter[str]()
    for run in runs(first):
        run.d.patience = patience
        run.p.kill()
        run.end()
        if run.second is not None:
            ends[run.second.status.name] += 1
            assert run.second.landed is (run.second.status.name == "FINISHED_LENGTH_CAPPED")
    assert ends["FINISHED_ERROR"] > 0
    assert ends["FINISHED_LENGTH_CAPPED"] > 0


@pytest.mark.parametrize("first", FIRST)
@pytest.mark.parametrize("patience", [0, 5, 30])
def test_a_rest_that_comes_too_late(patience: int, first: int) -> None:
    """A step waits no longer than its limit; the request fails, and its blocks leave vLLM's prefix cache."""
    ends, evicted = Counter[str](), 0
    for run in runs(first, often=0.0):
        run.d.patience = patience
        while run.second is None or run.second.status.name != "WAITING_FOR_REMOTE_KVS":
            run.step()
            run.d.step()
        for _ in range(run.choose.randrange(60)):
            run.step()
        run.d.hurry()
        for _ in range(3):
            run.d.step()
            run.d.check()
        second = second_of(run)
        ends[second.status.name] += 1
        evicted += bool(run.d.evicted)
        assert second.landed is (second.status.name == "FINISHED_LENGTH_CAPPED")
    assert ends["FINISHED_ERROR"] >= evicted > 0


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_step_does_not_wait_for_a_transfer_thread_that_has_ended(meanwhile: bool) -> None:
    """The thread ends before the step, or while the step waits for as long as for a rest that is late."""
    engine = FakeEngine(EngineNetwork(), "d", settings=small_settings(early_s=0.004))
    worker, limits_s = engine.workers[0], list[float]()
    worker.consuming.received.expect("d1", 0.0)
    assert worker.consuming.received.take() == {"d1"}

    def block(ready: Callable[[], bool], limit_s: float) -> None:
        limits_s.append(limit_s)
        worker.consuming.endpoint.broken = "the transfer thread failed"

    worker.consuming.received.block = block
    worker.consuming.endpoint.broken = "" if meanwhile else "the transfer thread failed"
    with pytest.raises(TransportError, match="the transfer thread failed"):
        worker.begin_step(StepWork(due={"d1"}))
    assert limits_s == ([REST_LIMIT_S] if meanwhile else [])


# --- the scheduler's part


def unsettled(*names: str) -> tuple[UnsettledRequests, set[int]]:
    """Requests of which vLLM was told; request number i has the blocks 10 * i and 10 * i + 1."""
    one, evicted = UnsettledRequests(), set[int]()
    one.evict = evicted.update
    for number, name in enumerate(names, 1):
        one.add(name, [10 * number, 10 * number + 1])
    assert one.tell(names) == set(names)
    return one, evicted


def test_a_step_waits_only_for_what_it_may_read() -> None:
    one, _ = unsettled("d1", "d2", "d3")
    assert one.due() == set()
    one.schedule("d1")
    one.uses("x", [5, 20, 6])
    assert one.due() == {"d1", "d2"}
    one.finish("x")  # its step has waited
    one.preempt({"d1"})  # its blocks may have other owners, while a worker may still write them
    assert one.due() == {"d1"}
    one.uses("d4", [20])
    one.lost({21})
    assert one.due() == {"d1"}
    one.check()


def test_a_block_may_have_two_owners() -> None:
    """vLLM has preempted the first one, whose report of the end is still under way."""
    one, evicted = unsettled("d1", "d2")
    one.add("d3", [10, 40])
    one.tell(["d3"])
    one.uses("x", [10, 50])
    one.check()
    assert one.due() == {"d1", "d3"}
    one.settle(["d1"])
    one.check()
    assert one.due() == {"d3"}
    one.uses("x", [51])
    one.lost({40})
    assert evicted == {10, 40, 50, 51}
    assert not one.finish("x")
    one.settle(["d2", "d3"])
    one.check()
    assert len(one) == 0


def test_requests_that_vllm_was_not_told_of_have_no_sharers() -> None:
    one = UnsettledRequests()
    one.add("d1", [1])
    one.uses("x", [1, 2])
    one.tell(["d1"])
    assert one.due() == set()
    assert not one.finish("x")


def test_a_request_keeps_its_blocks_until_it_is_settled() -> None:
    one, _ = unsettled("d1", "d2")
    for name in ("d1", "d2"):
        one.schedule(name)
    assert one.due() == {"d1", "d2"}
    assert one.finish("d1")
    assert one.due() == {"d1", "d2"}  # others may have its blocks from the prefix cache
    assert one.settle(["d1", "d2", "p1"]) == {"d1", "p1"}
    assert len(one) == 0
    assert not one.finish("d2")


def test_vllm_is_not_told_of_a_request_that_has_ended() -> None:
    one = UnsettledRequests()
    one.add("d1", [1])
    one.finish("d1")
    assert one.tell(["d1"]) == set()
    assert one.due() == set()
    assert one.settle(["d1"]) == {"d1"}


def test_lost_blocks_leave_the_prefix_cache_with_all_that_was_computed_from_them() -> None:
    one, evicted = unsettled("d1", "d2")
    one.uses("d3", [10, 30])
    one.uses("d3", [31])
    one.uses("d4", [40])
    for name in ("d1", "d2"):
        one.schedule(name)
    one.lost({11})
    assert evicted == {10, 11, 30, 31}
    assert one.due() == {"d2"}


def test_workers_name_lost_blocks_until_nothing_uses_them() -> None:
    one, _ = unsettled("d1")
    one.uses("d3", [10, 30])
    one.finish("d1")
    assert one.forgets() == []
    one.lost({11})
    assert one.forgets() == []  # d3 may wait for its step
    one.finish("d3")
    for _ in range(2):  # another worker loses its part later
        assert one.forgets() == ["d1"]
        assert one.forgets() == []
        one.lost({10, 11})
    assert one.settle(["d1"]) == {"d1"}


@pytest.mark.parametrize("who", ["d1", "d3"])
def test_no_answer_continues_with_a_token_of_missing_kv(who: str) -> None:
    """vLLM keeps the token of a request that it preempts during the step."""
    one, _ = unsettled("d1", "d2")
    one.uses("d3", [10, 30])
    one.preempt({who})
    one.lost({21})  # another request's
    with pytest.raises(TransportError, match="wrong tokens"):
        one.lost({10})


def test_a_loss_before_the_report_is_left_to_vllm() -> None:
    one = UnsettledRequests()
    one.add("d1", [10])
    one.preempt({"d1"})
    one.lost({10})
    one.finish("d1")
    assert one.forgets() == ["d1"]


# --- the worker's part


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_request_is_reported_before_its_end_and_settles_afterwards() -> None:
    clock = Clock()
    requests = ReceivedRequests(clock, early_s=2.0)
    requests.expect("d1", 10.0)
    clock.now_s = 7.9
    assert (requests.take(), requests.take_newest()) == (set(), set())
    clock.now_s = 8.0
    assert requests.take_newest() == {"d1"}
    assert requests.take() == {"d1"}
    assert requests.early == 1
    assert requests.await_rests({"d1", "d2"}, 0.0) == {"d1"}
    requests.expect("d1", 20.0)
    requests.add("d1", loaded=True)
    assert requests.await_rests({"d1"}, 0.0) == set()
    assert (requests.take_settled(), requests.take(), requests.take_newest()) == ({"d1"}, set(), set())


def test_a_new_prediction_replaces_the_earlier_one() -> None:
    clock = Clock()
    requests = ReceivedRequests(clock, early_s=2.0)
    requests.expect("d1", 10.0, 9.0)
    requests.expect("d1", math.inf, 9.0)  # the end is too far ahead
    clock.now_s = 8.5
    assert requests.take() == set()
    requests.expect("d1", 12.0, 11.0)
    clock.now_s = 9.9
    assert requests.take() == set()
    clock.now_s = 10.0
    assert requests.take() == {"d1"}


def test_nothing_is_reported_while_a_layer_is_overdue() -> None:
    clock = Clock()
    requests = ReceivedRequests(clock, early_s=2.0)
    requests.expect("d1", 10.0, 8.5)
    clock.now_s = 8.6
    assert requests.take() == set()
    requests.expect("d1", 10.0, 7.5)  # the next layer comes before the report, or the end is not known
    clock.now_s = 8.0
    assert requests.take() == set()
    requests.expect("d1", 11.0, 12.0)
    clock.now_s = 9.0
    assert requests.take() == {"d1"}


def test_without_early_reports_nothing_is_reported_before_its_end() -> None:
    requests = ReceivedRequests()
    requests.expect("d1", 0.0)
    assert requests.take() == set()


def test_a_transfer_that_fails_is_not_reported_early() -> None:
    clock = Clock()
    requests = ReceivedRequests(clock, early_s=2.0)
    requests.expect("d1", 10.0)
    requests.withdraw("d1")
    clock.now_s = 9.0
    assert not requests.lose("d1", [1])
    assert requests.take() == set()
    requests.add("d1", loaded=False)
    assert (requests.take(), requests.take_newest(), requests.lost_blocks()) == ({"d1"}, set(), set())


@pytest.mark.parametrize("ends_first", [True, False])
def test_lost_blocks_are_named_until_the_scheduler_forgets_them(ends_first: bool) -> None:
    requests = ReceivedRequests(Clock(), early_s=2.0)
    requests.expect("d1", 1.0)
    assert requests.take() == {"d1"}
    assert requests.lose("d1", [4, 5])
    assert requests.await_rests({"d1"}, 0.0) == set()
    if ends_first:
        requests.add("d1", loaded=False)
    assert requests.lost_blocks() == {4, 5}
    assert requests.take_settled() == set()
    requests.forget("d1")
    assert requests.lost_blocks() == set()
    if not ends_first:
        assert requests.take_settled() == set()
        requests.add("d1", loaded=False)
    assert requests.take_settled() == {"d1"}
    assert requests.take() == set()


def test_the_wait_for_a_report_ends_when_it_is_due() -> None:
    requests = ReceivedRequests(early_s=0.01)
    requests.expect("d1", time.monotonic() + 0.02)
    assert requests.take(wait_s=100.0) == {"d1"}
