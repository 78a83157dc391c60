"""Requests that wait for room in a decode or a colocated leader: their order, and every end of a wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from fake_model import fake_spec

from decode_node.costs import CostEstimates
from decode_node.leader import DecodeLeader
from decode_node.scheduler import DecodeScheduler
from decode_node.scheduler_options import SchedulerOptions
from disagg.colocated.leader import ColocatedLeader
from disagg.colocated.scheduler import ColocatedScheduler
from disagg.core.config.groups import EvictionName, PrefetchName, PrefillConfig
from disagg.core.tokens import pack_tokens
from disagg.core.types import RequestKey, SamplingParams
from disagg.model.chunks import PromptChunks
from disagg.node.kv_manager import KVManager
from disagg.node.waiting import WaitingRequest
from prefill_node.leader import PrefillLeader
from prefill_node.scheduler import PrefillScheduler
from transport.control import messages as m

ROWS, POOL_TOKENS, PAGE, MAX_WAITING = 8, 84, 4, 4
ROOM = 16
"""Tokens of a prompt of which three fit the pool, but none beside the request of `fill`."""
DEADLINE_S = 60.0
ANSWER = SamplingParams(max_tokens=4)


class Group:
    """A leader of one rank with a clock and a list of sent messages."""

    def __init__(self, role: str, prefetch: PrefetchName | None = None) -> None:
        """`prefetch`: policy of a third tier; None: no prefix cache."""
        self.sent: list[tuple[str, Any]] = []
        self.now_s, self.role = 0.0, role
        eviction: EvictionName | None = "lru" if prefetch else None
        kv_manager = KVManager(pool_tokens=POOL_TOKENS, page_size=PAGE, rows=ROWS, eviction=eviction)
        if prefetch:
            kv_manager.add_host_tier(64, 0, 1)
            settings = PrefillConfig(prefetch=prefetch, prefetch_min_tokens=1)
            kv_manager.add_storage(lambda prefix: [b""] * (prefix.tokens // PAGE), settings)
        send = lambda peer, message: self.sent.append((peer, message))  # noqa: E731
        spec, chunks = fake_spec(layers=1, kv_heads=1), PromptChunks(64)
        to_self, clock = (lambda message: None), (lambda: self.now_s)
        self.leader: DecodeLeader | ColocatedLeader
        if role == "decode":
            options = SchedulerOptions(
                group="decode",
                ranks=1,
                max_batch=ROWS,
                max_context_tokens=POOL_TOKENS,
                first_ticket=0,
                chunks=chunks,
                rates=CostEstimates(1e3, 1e3),
            )
            scheduler = DecodeScheduler(kv_manager, options)
            self.leader = DecodeLeader(scheduler, (), spec, send, to_self, clock, MAX_WAITING)
        else:
            colocated = ColocatedScheduler(
                kv_manager,
                group="colocated",
                chunks=chunks,
                max_batch=ROWS,
                max_context_tokens=POOL_TOKENS,
                first_ticket=0,
            )
            self.leader = ColocatedLeader(colocated, spec, send, to_self, clock, MAX_WAITING)
        rank = SimpleNamespace(control_address="rank-0", swap_blocks=0)
        group: Any = SimpleNamespace(ranks=(rank,), role=role, name=role, leader=rank)
        self.leader.join(group)
        if role == "decode":
            prefill: Any = SimpleNamespace(
                name="prefill", leader=SimpleNamespace(control_address="prefill-0")
            )
            self.leader.link(prefill)

    def reserve(
        self, name: str, tokens: int = ROOM, router: str = "a", wait_s: float = DEADLINE_S, **fields: Any
    ) -> None:
        message = self.message(name, tokens)
        self.leader.handle(router, msgspec.structs.replace(message, wait_s=wait_s, **fields))
        self.leader.check()

    @staticmethod
    def message(name: str, tokens: int = ROOM) -> m.Reserve:
        prompt = pack_tokens([1] * tokens)
        return m.Reserve(RequestKey(name), prompt, ANSWER, DEADLINE_S, "prefill", wait_s=DEADLINE_S)

    def fill(self) -> None:
        """Admits a request of nearly the whole pool."""
        self.reserve("first", tokens=68, wait_s=0.0)
        assert self.admitted == ["first"]

    def release(self, name: str, router: str = "a") -> None:
        self.leader.handle(router, m.Release(RequestKey(name), "over"))
        request = self.leader.scheduler.requests.get(RequestKey(name))
        if request is not None:
            self.leader.handle("rank-0", m.RankClosed(RequestKey(name), request.ticket.number, 0))
        self.leader.check()

    def not_stored(self) -> None:
        """The rank finds no page of any queued prompt."""
        for operation in self.leader.scheduler.kv_manager.take_storage_operations():
            self.leader.handle("rank-0", m.StorageMoved(operation.number, 0, 0, True))
        self.leader.check()

    def expire(self, now_s: float) -> None:
        """As the compute thread does before each step."""
        self.now_s = now_s
        with self.leader.changed:
            self.leader.expire()
        self.leader.check()

    @property
    def admitted(self) -> list[str]:
        return [str(key.request_id) for key in self.leader.scheduler.requests]

    @property
    def waiting(self) -> list[str]:
        return [str(one.reserve.key.request_id) for one in self.leader.waiting]

    def failed(self, name: str) -> list[m.Failed]:
        return [x for _, x in self.sent if isinstance(x, m.Failed) and x.key.request_id == name]

    def released(self, name: str) -> int:
        return sum(x == m.Released(RequestKey(name)) for _, x in self.sent)


@pytest.fixture(params=["decode", "colocated"])
def full(request: pytest.FixtureRequest) -> Group:
    group = Group(request.param)
    group.fill()
    return group


def test_waiting_requests_are_admitted_when_another_has_settled(full: Group) -> None:
    for number in range(3):
        full.reserve(f"r{number}")
    assert (full.admitted, full.waiting) == (["first"], ["r0", "r1", "r2"])
    assert full.leader.status().requests_waiting == 3
    full.release("first")
    assert (full.admitted, full.waiting) == (["r0", "r1", "r2"], [])
    assert full.leader.status().requests_waiting == 0
    assert not any(full.failed(f"r{number}") for number in range(3))


def test_a_lower_priority_number_overtakes_and_starts_at_once(full: Group) -> None:
    full.reserve("batch", tokens=40, priority=1)
    full.reserve("large", tokens=40, priority=-1)
    full.reserve("behind", tokens=1, priority=0)
    assert full.waiting == ["large", "behind", "batch"]
    full.reserve("small", tokens=1, priority=-2, wait_s=0.0)
    assert (full.admitted, full.waiting) == (["first", "small"], ["large", "behind", "batch"])


def test_a_small_request_does_not_overtake_a_large_one(full: Group) -> None:
    full.reserve("large", tokens=40)
    full.reserve("small", tokens=1)
    assert (full.admitted, full.waiting) == (["first"], ["large", "small"])
    full.release("first")
    assert (full.admitted, full.waiting) == (["large", "small"], [])


def test_routers_are_served_round_robin(full: Group) -> None:
    for name in ("a0", "a1", "b0", "c0"):
        full.reserve(name, tokens=48, router=name[0])
    order = ["first"]
    for _ in range(4):
        full.release(order[-1], router=order[-1][0] if order[-1] != "first" else "a")
        (only,) = full.admitted
        order.append(only)
    assert order[1:] == ["a0", "b0", "c0", "a1"]


def test_a_repeated_reserve_keeps_its_position(full: Group) -> None:
    for name in ("r0", "r1", "r0"):
        full.reserve(name)
    assert full.waiting == ["r0", "r1"]
    full.reserve("r0", router="b")
    assert [one.code for one in full.failed("r0")] == ["busy"]
    full.release("r0", router="b")
    assert full.waiting == ["r0", "r1"], "another router cannot end the wait"


def test_a_router_cannot_end_another_routers_request(full: Group) -> None:
    """A router releases every request that it sent, also one that was refused because its key is in use."""
    full.reserve("first", router="b")
    assert [one.code for one in full.failed("first")] == ["busy"]
    del full.sent[:]
    full.leader.handle("b", m.Release(RequestKey("first"), "refused"))
    assert full.sent == [("b", m.Released(RequestKey("first")))]
    assert not full.leader.scheduler.requests[RequestKey("first")].closing
    full.release("first", router="a")
    assert not full.leader.scheduler.requests


def test_a_request_that_may_not_wait_is_refused_at_once(full: Group) -> None:
    full.reserve("r0", wait_s=0.0)
    assert [one.code for one in full.failed("r0")] == ["busy"]
    full.reserve("r1")
    full.reserve("small", tokens=1, wait_s=0.0)
    assert ["1 requests wait" in one.message for one in full.failed("small")] == [True]
    assert full.waiting == ["r1"]


def test_a_request_that_never_fits_is_refused_behind_waiting_ones_too(full: Group) -> None:
    full.reserve("r0")
    full.reserve("huge", tokens=POOL_TOKENS)
    assert [one.code for one in full.failed("huge")] == ["prompt_too_long"]
    assert full.waiting == ["r0"]


def test_the_queue_is_bounded(full: Group) -> None:
    for number in range(MAX_WAITING + 1):
        full.reserve(f"r{number}", router=f"router-{number}")
    (failed,) = full.failed(f"r{MAX_WAITING}")
    assert (failed.code, failed.retry_after_s > 0) == ("busy", True)
    assert f"{full.role}.max_waiting" in failed.message
    assert len(full.waiting) == MAX_WAITING


def test_a_release_ends_a_wait_and_the_next_request_goes_on(full: Group) -> None:
    full.reserve("large", tokens=40)
    full.reserve("small", tokens=1)
    full.release("large")
    assert full.released("large") == 1
    assert (full.admitted, full.waiting) == (["first", "small"], []), "room for a small request was free"


def test_the_requests_of_a_lost_router_do_not_wait(full: Group) -> None:
    full.reserve("large", tokens=40, router="b")
    full.reserve("small", tokens=1)
    full.leader.on_peer_lost("b")
    assert (full.admitted, full.waiting) == (["first", "small"], [])


def test_a_wait_ends_after_its_time(full: Group) -> None:
    full.reserve("large", tokens=40, wait_s=2.0)
    full.reserve("small", tokens=1)
    full.expire(1.9)
    assert full.waiting == ["large", "small"]
    full.expire(2.1)
    (failed,) = full.failed("large")
    assert (failed.code, failed.retryable, failed.retry_after_s) == ("busy", True, 0.0)
    assert "within 2 s (router.reserve_wait_s)" in failed.message
    assert (full.admitted, full.waiting) == (["first", "small"], [])
    full.release("large")
    assert full.released("large") == 1


def test_a_wait_ends_at_the_deadline(full: Group) -> None:
    full.reserve("r0", wait_s=2 * DEADLINE_S, deadline_s=1.0)
    full.expire(1.1)
    assert [one.code for one in full.failed("r0")] == ["timeout"]


def test_a_broken_group_ends_every_wait(full: Group) -> None:
    full.reserve("r0")
    full.reserve("r1", router="b")
    full.leader.break_group("a step failed")
    for name in ("r0", "r1"):
        assert [one.code for one in full.failed(name)] == ["peer_lost"]
    assert full.waiting == []
    full.release("r0")
    assert full.released("r0") == 1


@pytest.mark.parametrize("role", ["decode", "colocated"])
def test_a_leader_is_not_idle_while_a_request_waits(role: str) -> None:
    """A step's end may free all room; the next admission is before the next step."""
    group = Group(role)
    group.reserve("first", wait_s=0.0)
    waiting = WaitingRequest("a", group.message("r0"), DEADLINE_S, DEADLINE_S)
    group.release("first")
    assert group.leader.wait_idle(0.0)
    group.leader.waiting.add(waiting)
    assert not group.leader.wait_idle(0.0)
    group.expire(0.0)
    assert group.admitted == ["r0"]
    assert not group.leader.wait_idle(0.0)
    group.release("r0")
    assert group.leader.wait_idle(0.0)


def test_the_loss_of_its_prefill_group_ends_a_wait() -> None:
    """Nothing was computed for it: its next attempt costs no recovery, however long the network is cut."""
    full = Group("decode")
    full.fill()
    full.reserve("r0")
    full.leader.on_peer_lost("prefill-0")
    assert [one.code for one in full.failed("r0")] == ["not_linked"]
    assert full.waiting == []


@pytest.fixture(params=["decode", "colocated"])
def fetching(request: pytest.FixtureRequest) -> Group:
    """A request that waits for its prefetch, and two behind it."""
    group = Group(request.param, "wait")
    group.reserve("held", wait_s=10.0)
    for name in ("r0", "r1"):
        group.reserve(name, tokens=PAGE)  # less than a page is cached: no prefetch
    return group


def test_requests_overtake_one_that_waits_for_its_prefetch(fetching: Group) -> None:
    assert (fetching.admitted, fetching.waiting) == (["r0", "r1"], ["held"])
    fetching.not_stored()
    assert (fetching.admitted, fetching.waiting) == (["r0", "r1", "held"], [])


def test_a_request_keeps_its_position_during_its_prefetch(fetching: Group) -> None:
    """Memory is short at the end of the prefetch: requests that came later do not overtake any more."""
    fetching.reserve("first", tokens=52, wait_s=0.0, router="b")
    assert fetching.admitted == ["r0", "r1", "first"]
    fetching.not_stored()
    fetching.reserve("later", tokens=PAGE)
    assert fetching.waiting == ["held", "later"]
    fetching.release("first", router="b")
    assert fetching.admitted == ["r0", "r1", "held", "later"]


def test_a_request_of_a_lower_number_holds_no_others_during_its_prefetch(fetching: Group) -> None:
    """Its priority counts once its prefetch has ended."""
    fetching.reserve("urgent", priority=-1)
    fetching.reserve("first", tokens=PAGE, priority=1, wait_s=0.0)
    assert (fetching.admitted, fetching.waiting) == (["r0", "r1", "first"], ["urgent", "held"])
    fetching.reserve("large", tokens=48, wait_s=0.0, router="b")
    fetching.not_stored()
    assert fetching.waiting == ["urgent", "held"], "memory is short"
    fetching.reserve("behind", tokens=1, wait_s=0.0)
    assert "behind" not in fetching.admitted
    fetching.release("large", router="b")
    assert fetching.admitted == ["r0", "r1", "first", "urgent", "held"]


def test_a_slow_storage_does_not_end_a_wait(fetching: Group) -> None:
    fetching.expire(4.9)
    assert fetching.waiting == ["held"]
    fetching.expire(5.1)
    assert (fetching.admitted, fetching.failed("held")) == (["r0", "r1", "held"], [])


def test_a_slow_storage_does_not_hold_a_prompt_until_its_deadline() -> None:
    kv_manager = KVManager(pool_tokens=POOL_TOKENS, page_size=PAGE, rows=ROWS, eviction="lru")
    kv_manager.add_host_tier(64, 0, 1)
    settings = PrefillConfig(prefetch="wait", prefetch_min_tokens=1)
    kv_manager.add_storage(lambda prefix: [b""] * (prefix.tokens // PAGE), settings)
    scheduler = PrefillScheduler(
        kv_manager, ranks=1, chunks=PromptChunks(64), max_context_tokens=POOL_TOKENS, max_waiting=MAX_WAITING
    )
    now_s, spec = [0.0], fake_spec(layers=1, kv_heads=1)
    leader = PrefillLeader(scheduler, spec, lambda *_: None, lambda _: None, lambda: now_s[0])
    key, prompt = RequestKey("held"), pack_tokens([1] * ROOM)
    leader.handle("router", m.Prefill(key, prompt, ANSWER, None, 10.0))
    for now_s[0], fetches in ((4.9, True), (5.1, False)):
        with leader.changed:
            leader.expire()
        assert scheduler.requests[key].fetches == fetches
    leader.check()


def resumed(tokens: int) -> Group:
    """Reserves a request, with others behind, whose prefill group is lost; another attempt takes over its pages."""
    group = Group("decode")
    group.reserve("lost", tokens=ROOM, wait_s=0.0)
    group.reserve("second", tokens=44, wait_s=0.0)
    assert group.admitted == ["lost", "second"]
    ticket = group.leader.scheduler.requests[RequestKey("lost")].ticket.number
    group.leader.on_peer_lost("prefill-0")
    for number in range(2):
        group.reserve(f"r{number}", tokens=30)
    assert group.waiting == ["r0", "r1"]
    group.reserve("again", tokens=tokens, after=RequestKey("lost"))
    group.leader.handle("rank-0", m.RankClosed(RequestKey("lost"), ticket, 0, landed_tokens=8))
    group.leader.check()
    return group


def test_a_request_that_takes_over_pages_does_not_wait_behind_others() -> None:
    group = resumed(ROOM)
    assert (group.admitted, group.waiting) == (["second", "again"], ["r0", "r1"])


def test_a_request_whose_pages_do_not_suffice_waits_behind_others() -> None:
    group = resumed(60)
    assert group.waiting[-1] == "again"
    assert not group.failed("again")
    group.release("second")
    assert group.admitted[:2] == ["r0", "r1"]
