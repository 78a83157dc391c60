"""A router whose decode groups are full, or not linked: how long a request waits, and the order of its tries."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from disagg.core.config.read import RouterConfig
from disagg.core.errors import BusyError, DisaggError, NotLinkedError, PeerLostError, RequestTimeoutError
from disagg.core.types import GroupInfo, KVLayout, RankInfo, SamplingParams, Shard, Span, Ticket
from disagg.router.answers import Output, RouterRequest, SessionReport
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.inproc import InprocControl, InprocHub

WAIT_S, LIMIT_S, LONG_S = 7.0, 60.0, 30.0


def group(role: str, name: str) -> GroupInfo:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"")
    return GroupInfo(name, role, 1, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", (rank,))


class Cluster:
    """A router and scripted leaders: each decode leader refuses as often as `refusals` says, then serves."""

    def __init__(
        self,
        refusals: dict[str, int],
        *,
        colocated: bool = False,
        pause_s: float = 0.0,
        code: str = BusyError.code,
        resumable: bool = False,
    ) -> None:
        self.refusals, self.pause_s, self.code = dict(refusals), pause_s, code
        self.resumable = resumable
        self.prefill_busy = False
        self.dies, self.gone = False, ""
        """A decode group whose death the prefill group has noticed, and the router has not."""
        self.reserves: list[tuple[str, m.Reserve]] = []
        self.released: list[str] = []
        self.replies = True
        self.hub, self.role = InprocHub(), "colocated" if colocated else "decode"
        self.leaders: dict[str, InprocControl] = {}
        self.groups = [group(self.role, name) for name in refusals]
        self.groups += [] if colocated else [group("prefill", "prefill")]

    def receive(self, name: str, message: m.Message) -> None:
        send = self.leaders[name].send
        match message:
            case m.Reserve():
                self.reserves.append((name, message))
                if not self.replies or name == self.gone:
                    return
                if self.refusals[name] > 0:
                    self.refusals[name] -= 1
                    failed = m.Failed(message.key, self.code, "refused", True, self.pause_s, self.resumable)
                    send("router", failed)
                else:
                    send("router", m.Reserved(message.key, Ticket(message.key, 1, name, Span(0, 1))))
            case m.Prefill() if self.prefill_busy:
                send("router", m.Failed(message.key, "busy", "prefill is full", True, 0.0))
            case m.Reserved(ticket=ticket) if ticket.group == "d1" and self.dies:
                self.gone = "d1"
                send("router", m.Failed(message.key, PeerLostError.code, "d1 is gone", True))
            case m.Reserved(ticket=ticket) | m.Prefill(ticket=Ticket() as ticket):
                send("router", m.Prefilled(message.key, [5]))
                decode = self.leaders[ticket.group]
                decode.send("router", m.Tokens(message.key, 1, [6], "length"))
            case m.Release():
                self.released.append(name)
                send("router", m.Released(message.key))

    def run(self, work: Callable[[Router], Awaitable[None]], wait_s: float = WAIT_S) -> None:
        async def main() -> None:
            dispatcher = ResponseDispatcher(InprocControl(self.hub, "router"), asyncio.get_running_loop())
            self.dispatcher = dispatcher
            for one in self.groups:
                self.leaders[one.name] = leader = InprocControl(self.hub, one.name)
                name = one.name
                leader.start(lambda peer, message, name=name: self.receive(name, message), lambda peer: None)
            dispatcher.start()
            try:
                async with asyncio.timeout(LIMIT_S):
                    router = Router(dispatcher, self.groups, config=RouterConfig(reserve_wait_s=wait_s))
                    await work(router)
                    assert not router.recoveries, "another choice is no recovery"
                    assert all((one.requests, one.tokens) == (0, 0) for one in router.engines)
            finally:
                dispatcher.close()
                for leader in self.leaders.values():
                    leader.close()

        asyncio.run(main())

    @property
    def tried(self) -> list[str]:
        return [name for name, _ in self.reserves]


async def ask(router: Router, name: str = "r", timeout_s: float = LONG_S) -> tuple[list[int], SessionReport]:
    report, tokens = SessionReport(), list[int]()
    answers = router.generate(
        name, [1, 2, 3], SamplingParams(max_tokens=2), timeout_s=timeout_s, report=report
    )
    async with aclosing(answers) as outputs:
        async for output in outputs:
            tokens += output.tokens
    return tokens, report


def error_of(cluster: Cluster, timeout_s: float = LONG_S) -> DisaggError:
    found: list[DisaggError] = []

    async def work(router: Router) -> None:
        with pytest.raises(DisaggError) as caught:
            await ask(router, timeout_s=timeout_s)
        found.append(caught.value)

    cluster.run(work)
    return found[0]


def answered(cluster: Cluster) -> SessionReport:
    found: list[SessionReport] = []

    async def work(router: Router) -> None:
        tokens, report = await ask(router)
        assert tokens == [5, 6]
        found.append(report)

    cluster.run(work)
    return found[0]


@pytest.mark.parametrize("colocated", [False, True])
def test_a_request_leaves_a_full_group_for_another(colocated: bool) -> None:
    cluster = Cluster({"d1": 1000, "d2": 0}, colocated=colocated)
    report = answered(cluster)
    assert cluster.tried == ["d1", "d2"]
    assert (report.decode, report.recoveries) == ("d2", [])
    assert cluster.released.count("d1") == 1, "the full group has nothing of the request"
    assert [reserve.wait_s for _, reserve in cluster.reserves] == [WAIT_S, WAIT_S]
    assert len({reserve.key for _, reserve in cluster.reserves}) == 2, "each try has its own epoch"


def test_every_group_is_tried_before_one_again() -> None:
    cluster = Cluster({"d1": 2, "d2": 2, "d3": 2})
    answered(cluster)
    assert sorted(cluster.tried[:3]) == sorted(cluster.tried[3:6]) == ["d1", "d2", "d3"]
    assert len(cluster.tried) == 7


def test_the_only_group_may_let_the_request_wait_until_its_deadline() -> None:
    cluster = Cluster({"d1": 2})
    answered(cluster)
    assert cluster.tried == ["d1"] * 3
    for _, reserve in cluster.reserves:
        assert WAIT_S < reserve.wait_s == reserve.deadline_s <= LONG_S


def test_requests_of_one_router_reserve_without_waiting_for_each_other() -> None:
    cluster = Cluster({"d1": 0})
    cluster.replies = False

    async def work(router: Router) -> None:
        asked = [asyncio.create_task(ask(router, f"r{number}")) for number in range(3)]
        while len(cluster.reserves) < 3:
            await asyncio.sleep(0.001)
        for task in asked:
            task.cancel()
        await asyncio.wait(asked)

    cluster.run(work)
    assert sorted(cluster.released) == ["d1"] * 3 + ["prefill"] * 3, "a client that leaves ends its wait"


def test_a_busy_prefill_group_ends_the_request() -> None:
    cluster = Cluster({"d1": 0, "d2": 0})
    cluster.prefill_busy = True
    error = error_of(cluster)
    assert isinstance(error, BusyError)
    assert "prefill is full" in str(error)
    assert len(cluster.tried) == 1


def test_a_pause_beyond_the_deadline_ends_the_request_at_once() -> None:
    cluster = Cluster({"d1": 1000, "d2": 1000}, pause_s=1000.0)
    assert isinstance(error_of(cluster), BusyError)
    assert cluster.tried == ["d1"]


def test_full_groups_are_tried_until_the_deadline() -> None:
    cluster = Cluster({"d1": 1_000_000, "d2": 1_000_000}, pause_s=0.01)
    assert isinstance(error_of(cluster, timeout_s=0.3), BusyError | RequestTimeoutError)
    assert {"d1", "d2"} == set(cluster.tried)


def test_a_request_past_its_deadline_reaches_no_group() -> None:
    cluster = Cluster({"d1": 0})
    assert isinstance(error_of(cluster, timeout_s=0.0), RequestTimeoutError)
    assert cluster.reserves == []


def test_a_request_leaves_a_pair_that_is_not_linked() -> None:
    cluster = Cluster({"d1": 1000, "d2": 0}, code=NotLinkedError.code)
    report = answered(cluster)
    assert cluster.tried == ["d1", "d2"]
    assert report.decode == "d2"


@pytest.mark.parametrize(
    ("code", "resumable"),
    [
        (NotLinkedError.code, False),
        pytest.param(NotLinkedError.code, True, marks=pytest.mark.slow),
        (PeerLostError.code, True),
    ],
)
def test_a_request_waits_for_the_link_of_the_only_pair(code: str, resumable: bool) -> None:
    """More often than it may be recovered: nothing was computed for it, however often one cut is noticed."""
    cluster = Cluster({"d1": RouterConfig().max_recoveries + 2}, code=code, resumable=resumable)
    assert answered(cluster).recoveries == []
    assert len(cluster.tried) == RouterConfig().max_recoveries + 3


def test_a_wait_for_a_link_ends_at_the_deadline() -> None:
    cluster = Cluster({"d1": 1000}, code=NotLinkedError.code)
    error = error_of(cluster, timeout_s=1.0)
    assert isinstance(error, NotLinkedError)
    assert 2 < len(cluster.tried) < 8, "the pause grows"


def test_a_death_that_two_groups_notice_is_one_recovery() -> None:
    """The prefill group reports it first. The router returns to the only decode group, whose death it learns then."""
    cluster = Cluster({"d1": 0})
    cluster.dies = True

    async def work(router: Router) -> None:
        asked = asyncio.ensure_future(ask(router))
        while len(cluster.tried) < 2:
            await asyncio.sleep(0.005)
        assert cluster.gone == "d1"
        cluster.dispatcher.lose("d1")
        cluster.dies, cluster.gone = False, ""
        cluster.dispatcher.revive(["d1"])  # its replacement
        tokens, report = await asked
        assert tokens == [5, 6]
        assert report.recoveries == ["prefill_lost"]
        assert router.recoveries == {"prefill_lost": 1}
        router.recoveries.clear()

    cluster.run(work)


def test_an_error_of_the_receiver_of_outputs_ends_its_own_request_only() -> None:
    async def work(router: Router) -> None:
        failed = SessionReport()

        def fail(output: Output) -> None:
            raise ValueError("a bug of the receiver")

        request = RouterRequest("bad", [1, 2, 3], SamplingParams(max_tokens=2), LONG_S, report=failed)
        bad = asyncio.create_task(router.run(request, fail))
        tokens, report = await ask(router, "good")
        with pytest.raises(ValueError, match="a bug of the receiver"):
            await bad
        assert (tokens, report.released, failed.released) == ([5, 6], True, True)

    Cluster({"decode": 0}).run(work)


def test_answers_that_are_closed_early_are_released() -> None:
    async def work(router: Router) -> None:
        report = SessionReport()
        answers = router.generate(
            "r", [1, 2, 3], SamplingParams(max_tokens=2), timeout_s=LONG_S, report=report
        )
        assert (await anext(answers)).tokens == (5,)
        await answers.aclose()
        assert report.released

    Cluster({"decode": 0}).run(work)
