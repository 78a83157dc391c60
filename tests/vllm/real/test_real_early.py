"""KV that vLLM's own scheduler takes for received before it has come; see docs/vllm.md, "Early reports"."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

REASON = "vLLM is not installed; `make test-vllm` makes an environment with it"
pytest.importorskip("vllm.v1.core.sched.scheduler", reason=REASON, exc_type=ImportError)

from real_vllm import Make, RealEngine, prompt_of, run
from vllm.v1.request import Request, RequestStatus

from disagg.core.errors import TransportError

EARLY = {"early_s": 0.004}
PROMPT = prompt_of(100)
both_schedulers = pytest.mark.parametrize("asynchronous", [False, True])


@contextmanager
def no_kv_leaves(engine: RealEngine) -> Iterator[threading.Event]:
    """Stops the producer's transfer thread; setting the event lets it go on."""
    gate = threading.Event()
    engine.worker.working.producing.endpoint.post(lambda: gate.wait(20.0))
    try:
        yield gate
    finally:
        gate.set()


def engines(make: Make, whole_blocks: bool = False, **options: Any) -> tuple[RealEngine, RealEngine]:
    """A producer and a consumer, which are linked."""
    p = make(role="kv_producer", whole_blocks=whole_blocks)
    d = make(EARLY, role="kv_consumer", policy="fail", whole_blocks=whole_blocks, **options)
    warm = asks(p, d, "warm", prompt_of(20, 99))
    run([p, d], lambda: warm.is_finished() and not d.scheduler.has_requests())
    return p, d


def asks(p: RealEngine, d: RealEngine, name: str, prompt: list[int], answer: int = 3) -> Request:
    """A prompt that `p` has computed and that `d` continues."""
    p.prefill(f"p{name}", prompt)
    run([p], lambda: f"p{name}" in p.params)
    return d.submit(f"d{name}", prompt, p.params[f"p{name}"], answer)


def opens(d: RealEngine, name: str, hurry: bool = True) -> None:
    """Steps the consumer until its transfer is open, and reports it early, with `hurry`."""
    consuming = d.worker.working.consuming

    def is_open() -> bool:
        if hurry:
            d.hurry()
        reserved = [one for one in vars(consuming)["_open"].values() if one.work.request_id == name]
        return bool(reserved) and bool(consuming.endpoint.agent.statistics().tickets)

    while not is_open():
        d.step()
    if hurry:
        d.hurry()


def later_requests_are_right(p: RealEngine, d: RealEngine, prompt: list[int] = PROMPT) -> None:
    """No KV that was lost is in the prefix cache: each step compares what it reads."""
    again = asks(p, d, "again", prompt)
    alone = d.submit("alone", [*prompt, 5], None, 2)
    run([p, d], lambda: again.is_finished() and alone.is_finished() and not d.scheduler.has_requests())
    run([p, d], lambda: not p.scheduler.requests)
    assert again.status is alone.status is RequestStatus.FINISHED_LENGTH_CAPPED
    d.check_empty()
    p.check_empty()


@both_schedulers
@pytest.mark.parametrize("whole_blocks", [False, True])
def test_a_step_waits_for_the_rest(make: Make, asynchronous: bool, whole_blocks: bool) -> None:
    p, d = engines(make, whole_blocks, asynchronous=asynchronous)
    with no_kv_leaves(p) as gate:
        two = asks(p, d, "2", prompt_of(100, 2))
        opens(d, "d2")
        timer = threading.Timer(0.2, gate.set)
        timer.start()
        while "d2" not in d.external:
            assert not gate.is_set(), "the step has not waited"
            d.step()
        assert gate.is_set()
        timer.join()
    run([p, d], lambda: two.is_finished() and not d.scheduler.has_requests())
    assert (two.status, d.external["d2"]) == (RequestStatus.FINISHED_LENGTH_CAPPED, 99)
    later_requests_are_right(p, d, prompt_of(100, 2))


@both_schedulers
def test_no_step_waits_for_a_request_without_a_place(make: Make, asynchronous: bool) -> None:
    """vLLM computes eight requests at once here; the one that was reported waits until one of them ends."""
    p, d = engines(make, asynchronous=asynchronous, blocks=80)
    received = d.worker.working.consuming.received
    with no_kv_leaves(p) as gate:
        one = asks(p, d, "1", PROMPT)
        opens(d, "d1", hurry=False)
        others = [d.submit(f"o{i}", prompt_of(10, 40 + i), None, 100) for i in range(8)]
        while any(not other.num_output_tokens for other in others):
            d.step()
        early, waited_s = received.early, received.waited_s
        received.expect("d1", time.monotonic())
        for _ in range(10):
            d.step()
        assert (received.early, received.waited_s, "d1" in d.external) == (early + 1, waited_s, False)
        gate.set()
    run([p, d], lambda: not d.scheduler.has_requests())
    assert one.status is RequestStatus.FINISHED_LENGTH_CAPPED
    later_requests_are_right(p, d)


@both_schedulers
def test_a_rest_that_does_not_come_in_time(
    make: Make, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.vllm.worker.REST_LIMIT_S", 0.05)
    p, d = engines(make, asynchronous=asynchronous)
    with no_kv_leaves(p):
        one = asks(p, d, "1", PROMPT)
        opens(d, "d1")
        while not one.is_finished():
            d.step()
        assert one.status is RequestStatus.FINISHED_ERROR
        assert d.misread == {"d1": 0}
    run([p, d], lambda: not d.scheduler.has_requests())
    later_requests_are_right(p, d)


@both_schedulers
@pytest.mark.parametrize("steps", [0, 1, 2])
def test_a_request_with_the_same_prefix_fails_too(make: Make, asynchronous: bool, steps: int) -> None:
    """vLLM gives it the lost blocks from its prefix cache; `steps`: how long after the report."""
    p, d = engines(make, asynchronous=asynchronous)
    with no_kv_leaves(p):
        one = asks(p, d, "1", PROMPT, answer=30)
        opens(d, "d1")
        while "d1" not in vars(d.scheduler.connector.scheduling.unsettled)["_all"]:
            d.step()
        other = None
        timer = threading.Timer(0.05, d.lose, ["d1"])
        timer.start()
        for step in range(100):
            if step == steps:
                other = d.submit("other", [*PROMPT[:80], *prompt_of(30, 7)], None, 30)
            d.step()
        timer.join()
        assert one.status is RequestStatus.FINISHED_ERROR
    assert other is not None
    run([p, d], lambda: not d.scheduler.has_requests())
    misread = "other" in d.misread
    assert other.status is (RequestStatus.FINISHED_ERROR if misread else RequestStatus.FINISHED_LENGTH_CAPPED)
    later_requests_are_right(p, d, [*PROMPT[:80], *prompt_of(30, 7)])
    later = d.submit("later", PROMPT, None)
    run([d], later.is_finished)


@both_schedulers
@pytest.mark.parametrize("steps", range(2))
def test_all_clients_leave_while_a_step_waits(make: Make, asynchronous: bool, steps: int) -> None:
    """vLLM reads the step's result after that, and evicts no block of requests that have ended."""
    p, d = engines(make, asynchronous=asynchronous)
    longer = [*PROMPT, *prompt_of(60, 7)]
    with no_kv_leaves(p):
        asks(p, d, "1", PROMPT)
        opens(d, "d1")
        for _ in range(steps):
            d.step()
        d.submit("other", longer, None)
        update, left = d.scheduler.update_from_output, []

        def aborts_come_first(output: Any, result: Any) -> Any:
            if result.kv_connector_output.invalid_block_ids:
                left.extend(name for name in ("d1", "other") if not d.requests[name].is_finished())
                for name in left:
                    d.abort(name)
            return update(output, result)

        d.scheduler.update_from_output = aborts_come_first
        timer = threading.Timer(0.05, d.lose, ["d1"])
        timer.start()
        run([d], lambda: all(d.requests[name].is_finished() for name in ("d1", "other")))
        timer.join()
        assert left == ["d1", "other"]
    run([p, d], lambda: not d.scheduler.has_requests())
    short = d.submit(
        "short", PROMPT, None
    )  # the prefix of blocks that "other" has computed is in the cache again
    run([d], short.is_finished)
    later_requests_are_right(p, d, longer)


@both_schedulers
@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.parametrize("steps", range(4))
def test_a_client_leaves(make: Make, asynchronous: bool, steps: int, lost: bool) -> None:
    """vLLM would free the blocks of a request that it takes for received at once."""
    p, d = engines(make, asynchronous=asynchronous)
    with no_kv_leaves(p) as gate:
        one = asks(p, d, "1", PROMPT)
        opens(d, "d1")
        timer = threading.Timer(0.05, d.lose if lost else gate.set, ["d1"] if lost else [])
        timer.start()
        for _ in range(steps):
            d.step()
        d.abort("d1")
        assert one.is_finished()
        others = [d.submit(f"other{i}", [*PROMPT[: 40 * i], *prompt_of(60, 9 + i)], None) for i in (0, 1, 2)]
        run([d], lambda: all(other.is_finished() for other in others))
        timer.join()
    run([p, d], lambda: not d.scheduler.has_requests())
    later_requests_are_right(p, d)


def test_a_preempted_request_whose_kv_is_lost_ends_the_engine(make: Make) -> None:
    """vLLM keeps the token that the step computes; an answer must not continue with it."""
    p, d = engines(make, asynchronous=True)
    with no_kv_leaves(p):
        one = asks(p, d, "1", PROMPT)
        opens(d, "d1")
        threading.Timer(0.05, d.lose, ["d1"]).start()
        while one.status is not RequestStatus.RUNNING:
            d.step()
        d.scheduler.running.remove(one)
        d.scheduler._preempt_request(one, 0.0)  # noqa: SLF001 - as vLLM does when it has no block left
        with pytest.raises(TransportError, match="wrong tokens"):
            run([d], one.is_finished)


def test_an_engine_that_also_produces_reports_nothing_early(make: Make) -> None:
    """A prompt with lost blocks in its prefix would leave with the step that vLLM drops."""
    assert make(EARLY, role="kv_both", policy="fail").scheduler.connector.scheduling.unsettled is None
    assert make(EARLY, role="kv_consumer", policy="fail").scheduler.connector.scheduling.unsettled is not None


@both_schedulers
@pytest.mark.parametrize("seed", range(6))
def test_random_lifecycles(make: Make, seed: int, asynchronous: bool) -> None:
    """Few blocks, shared prefixes, aborts, early reports at random times, and KV that is lost after them."""
    rng = random.Random(seed)
    options = {"blocks": 30, "asynchronous": asynchronous, "policy": "fail", "whole_blocks": seed % 2 == 1}
    roles = ("kv_producer", "kv_consumer")
    p, d = (make(EARLY | {"lease_s": 5.0}, role=role, **options) for role in roles)
    prompts = [
        [*prompt_of(rng.choice((0, 48)), 50), *prompt_of(rng.choice((10, 32, 70)), i)] for i in range(40)
    ]
    waiting, started = list(enumerate(prompts)), set[str]()
    decoded: list[str] = []

    def advance() -> bool:
        if waiting and rng.random() < 0.5:
            number, prompt = waiting.pop()
            p.prefill(f"p{number}", prompt)
            if rng.random() < 0.3:  # it may share blocks of a request whose KV still comes
                d.submit(f"alone{number}", prompt, None)
        if rng.random() < 0.5:
            d.hurry()
        for name in sorted(set(p.params) - started):
            if rng.random() < 0.5:
                started.add(name)
                d.submit(f"d{name}", prompts[int(name[1:])], p.params[name])
                decoded.append(f"d{name}")
        if decoded and rng.random() < 0.1:
            name = rng.choice(decoded[-4:])
            if not d.requests[name].is_finished():
                rng.choice((d.lose, d.abort))(name)
        idle = not (p.scheduler.has_requests() or d.scheduler.has_requests())
        return not waiting and idle and not set(p.params) - started

    run([p, d], advance)
    p.check_empty()
    d.check_empty()
    assert len([name for name in decoded if d.external.get(name, 0) > 0]) > 5
