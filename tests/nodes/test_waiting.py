"""The queue of requests that wait for room in a group, against a plain list, by random sequences."""

from __future__ import annotations

import random
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from disagg.core.errors import InvariantError
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.node.waiting import WaitingQueue, WaitingRequest
from transport.control import messages as m

MAX_WAITING = 12
ROUTERS = ("a", "b", "c")
PRIORITIES = (-5, 0, 3)


def waiting(router: str, number: int, priority: int = 0) -> WaitingRequest:
    key = RequestKey(f"r{number}")
    reserve = m.Reserve(
        key, pack_tokens([1]), SamplingParams(), 60.0, "prefill", wait_s=5.0, priority=priority
    )
    return WaitingRequest(router, reserve, 60.0, 5.0)


def taken(queue: WaitingQueue) -> WaitingRequest:
    """Takes the request at the head."""
    one = queue.first(lambda one: True)
    assert one is not None
    queue.take(one)
    return one


class Model:
    """The rule in plain words: lists of requests, and the routers in the order of their latest service."""

    def __init__(self) -> None:
        self.queues: list[tuple[str, list[WaitingRequest]]] = []

    def add(self, one: WaitingRequest) -> None:
        for router, queue in self.queues:
            if router == one.router:
                queue.append(one)
                return
        self.queues.append((one.router, [one]))

    def all(self) -> list[WaitingRequest]:
        return [one for _, queue in self.queues for one in queue]

    def first(self, held: set[RequestKey]) -> WaitingRequest | None:
        return next((one for one in self.all() if one.reserve.key not in held), None)

    def take(self, one: WaitingRequest) -> None:
        (queue,) = (queue for router, queue in self.queues if router == one.router)
        self.queues.remove((one.router, queue))
        if len(queue) > 1:
            self.queues.append((one.router, [other for other in queue if other is not one]))

    def remove(self, one: WaitingRequest) -> None:
        self.queues = [(router, [r for r in queue if r is not one]) for router, queue in self.queues]
        self.queues = [(router, queue) for router, queue in self.queues if queue]


class PriorityModel:
    """A `Model` for each priority."""

    def __init__(self) -> None:
        self.models = {priority: Model() for priority in PRIORITIES}

    def all(self) -> list[WaitingRequest]:
        return [one for model in self.models.values() for one in model.all()]

    def add(self, one: WaitingRequest) -> None:
        self.models[one.reserve.priority].add(one)

    def first(self, held: set[RequestKey]) -> WaitingRequest | None:
        firsts = (model.first(held) for model in self.models.values())
        return next((one for one in firsts if one is not None), None)

    def take(self, one: WaitingRequest) -> None:
        self.models[one.reserve.priority].take(one)

    def remove(self, one: WaitingRequest) -> None:
        self.models[one.reserve.priority].remove(one)


@pytest.mark.parametrize("seed", range(100))
def test_any_sequence_keeps_the_order(seed: int) -> None:
    choose = random.Random(seed)
    queue, model, held = WaitingQueue(MAX_WAITING), PriorityModel(), set[RequestKey]()
    for number in range(200):
        kind = choose.choice(["add", "add", "take", "remove", "hold"])
        first = queue.first(lambda one: one.reserve.key not in held)
        assert first is model.first(held)
        if kind == "add" and not queue.full:
            one = waiting(choose.choice(ROUTERS), number, choose.choice(PRIORITIES))
            queue.add(one)
            model.add(one)
        elif kind == "take" and first is not None:
            queue.take(first)
            model.take(first)
        elif kind == "hold" and len(queue):
            held.symmetric_difference_update([choose.choice(model.all()).reserve.key])
        elif kind == "remove" and len(queue):
            one = choose.choice(model.all())
            assert queue.remove(one.reserve.key) is one
            assert queue.remove(one.reserve.key) is None
            model.remove(one)
        queue.check()
        assert list(queue) == model.all()
        ahead = [one.reserve.priority for one in model.all() if one.reserve.key not in held]
        assert [queue.is_first(one, lambda other: other.reserve.key not in held) for one in PRIORITIES] == [
            all(one < other for other in ahead) for one in PRIORITIES
        ]
        assert all(queue.get(one.reserve.key) is one for one in model.all())
        found = queue.statistics()
        routers = {one.router for one in model.all()}
        assert (found.waiting, found.routers) == (len(model.all()), len(routers))
        assert queue.full == (len(queue) == MAX_WAITING)


def test_a_router_with_many_requests_does_not_delay_the_one_of_another() -> None:
    queue = WaitingQueue(100)
    for number in range(50):
        queue.add(waiting("many", number))
    queue.add(waiting("one", 50))
    assert [taken(queue).router for _ in range(2)] == ["many", "one"]


def test_routers_are_served_in_equal_shares_while_they_wait() -> None:
    queue, served = WaitingQueue(100), Counter[str]()
    for number in range(90):
        queue.add(waiting(ROUTERS[0] if number < 50 else ROUTERS[1 + number % 2], number))
    for _ in range(45):
        served[taken(queue).router] += 1
    assert set(served.values()) == {15}


def test_the_end_of_a_wait_at_the_head_keeps_its_router_first() -> None:
    queue = WaitingQueue(10)
    ones = [waiting("a", 0), waiting("a", 1), waiting("b", 2)]
    for one in ones:
        queue.add(one)
    queue.remove(ones[0].reserve.key)
    assert [taken(queue), taken(queue)] == ones[1:]


def test_an_inconsistent_queue_is_reported() -> None:
    queue = WaitingQueue(10)
    queue.add(waiting("a", 0))
    lost: Any = SimpleNamespace(router="a", reserve=waiting("a", 1).reserve)
    queue.add(lost)
    lost.router = "b"
    with pytest.raises(InvariantError, match="the waiting queue is inconsistent"):
        queue.check()


def test_requests_beyond_the_limit_are_an_error_of_the_caller() -> None:
    queue = WaitingQueue(1)
    queue.add(waiting("a", 0))
    with pytest.raises(AssertionError, match="refuses further requests"):
        queue.add(waiting("a", 1))
