"""Loads from host memory in a colocated group: no layer is read before its load, and no answer waits for a load."""

from __future__ import annotations

import random

import pytest
from simulated_colocated import LAYERS, Colocated

DOCUMENT = [token % 64 for token in range(48)]
OTHER = [token * 7 % 64 for token in range(8)]


def test_a_prompt_alone_computes_its_first_layers_while_later_layers_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The load begins with the reservation, in a plan without a step."""
    group = Colocated(monkeypatch)
    group.in_host_memory(DOCUMENT)
    left: list[int] = []
    group.ranks[0].runner.between_layers = lambda: left.append(len(group.loads[0].work))
    asked = group.submit("hit", [*DOCUMENT, 5], 1)
    order = group.leader.next_plan()
    assert order is not None
    group.ranks[0].step(order)
    group.plans.append(order)
    assert (order.work, len(order.cache_operations)) == ([], 1)
    assert group.late[0].waits == [], "a plan without a step waits for nothing"
    plan = group.step()
    assert plan is not None
    assert plan.awaited_loads == [order.cache_operations[0].number]
    assert len(left) == len(group.late[0].waits) == LAYERS
    assert left[0] > left[1] > left[2], "each layer waits for its own group"
    assert not asked.over, "the load is not reported"
    group.settle()


def test_no_answer_waits_for_a_load(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Colocated(monkeypatch)
    group.in_host_memory(DOCUMENT)
    running = group.submit("running", OTHER, 30)
    while len(running.tokens) < 2:
        group.step()
    hit = group.submit("hit", [*DOCUMENT, 5], 2)
    before = len(running.tokens)
    for _ in range(10):
        group.step()
    assert len(running.tokens) >= before + 9, "its steps go on"
    assert hit.tokens == []
    assert group.late[0].waits == []
    assert group.leader.statistics().memory.host.loading_pages > 0
    group.load()
    before = len(running.tokens)
    for _ in range(3):
        group.step()
    assert hit.tokens, "the prompt has joined the answer's steps"
    assert len(running.tokens) >= before + 2
    assert group.late[0].waits == []
    group.settle()


def test_only_the_first_prompt_of_a_step_makes_it_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt behind one that loads shares its step; one that loads joins no step of an earlier prompt."""
    group = Colocated(monkeypatch, pool_tokens=256)
    group.in_host_memory(DOCUMENT)
    group.in_host_memory(DOCUMENT[::-1])
    for name, prompt in (("hit", DOCUMENT), ("plain", OTHER), ("second hit", DOCUMENT[::-1])):
        group.submit(name, [*prompt, 9], 3)
        group.deliver()
    plan = group.step()
    assert plan is not None
    assert [work.key.request_id for work in plan.work] == ["hit", "plain"]
    assert len(plan.awaited_loads) == 1
    group.settle()
    assert any(work.key.request_id == "second hit" for plan in group.plans for work in plan.work)


def test_an_abort_during_a_load_frees_the_pages_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Freed pages become NaN, and must be unwritten when they are allocated again."""
    group = Colocated(monkeypatch)
    group.in_host_memory(DOCUMENT)
    group.submit("hit", [*DOCUMENT, 5], 2)
    order = group.leader.next_plan()
    group.ranks[0].step(order)
    group.abort("hit")
    group.check()
    assert group.leader.statistics().memory.host.loading_pages > 0
    group.load()
    group.submit("again", [*DOCUMENT, 6], 2)
    group.settle()


def run(seed: int) -> tuple[int, int, int]:
    """Requests arrive and end, copies and loads proceed at any time, between layers too.

    Returns the numbers of loads, of steps that waited for one, and of loads under way beside a step without a wait.
    """
    choose = random.Random(seed)
    states = seed % 3 == 1
    with pytest.MonkeyPatch.context() as patch:
        group = Colocated(
            patch,
            choose.choice([1, 2]),
            states=states,
            blocks=choose.choice([30, 100]),
            async_steps=choose.random() < 0.7,
            more=((2, 1),) if seed % 3 == 2 else (),
        )
        pace = choose.choice([0.05, 0.3, 0.8])

        def between_layers() -> None:
            while choose.random() < pace:
                group.act(choose)

        for rank in group.ranks:
            rank.runner.between_layers = between_layers
        documents = [[choose.randrange(64) for _ in range(48)] for _ in range(4)]
        loads = waited = beside = 0
        for number in range(120):
            if choose.random() < 0.25 and number < 100:
                tail = [choose.randrange(64) for _ in range(choose.randint(1, 9))]
                prompt = choose.choice(documents)[: choose.randint(1, 48)] + tail
                group.submit(f"r{number}", prompt, choose.choice([1, 3, 12]))
            if group.requests and choose.random() < 0.03:
                group.abort(choose.choice(list(group.requests)))
            plan = group.step()
            if plan is not None:
                loads += sum(not one.store for one in plan.cache_operations)
                waited += bool(plan.awaited_loads)
                loading = group.leader.statistics().memory.host.loading_pages
                beside += bool(plan.work and loading and not plan.awaited_loads)
            between_layers()
            if number % 10 == 0:
                group.check()
        group.settle()
    return loads, waited, beside


def test_any_order() -> None:
    """One run each of layers of one class, with recurrent states, and with several classes."""
    assert all(sum(counts) for counts in zip(*(run(seed) for seed in range(3)), strict=True))


@pytest.mark.slow
def test_any_order_of_many() -> None:
    assert all(sum(counts) > 20 for counts in zip(*(run(seed) for seed in range(3, 60)), strict=True))
