"""Requests whose prompts leave a decode group: messages, answers, loads, and what else can happen meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from conditions import until_async

from disagg.core.config.read import RouterConfig
from disagg.core.errors import DisaggError, RequestTimeoutError
from disagg.core.prefixes import Digest, PrefixKey, pack_block_hashes
from disagg.core.tokens import pack_tokens
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, SamplingParams, Shard, Span, Ticket
from disagg.router.answers import Output, RouterRequest, SessionReport
from disagg.router.policy import RoutingRequest, round_robin
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.base import ControlChannel

CONFIG = RouterConfig(local_prefill_queue_tokens=100, local_prefill_cost=2.0)
SAMPLING = SamplingParams(max_tokens=2)
LIMIT_S = 1000.0


class Channel(ControlChannel):
    """Keeps what the router sends; the test is the sender of what it receives."""

    address = "router"

    def __init__(self) -> None:
        self.sent: list[tuple[str, m.Message]] = []

    def start(
        self, handler: Any, on_peer_lost: Any, on_peer_met: Any = None, on_peer_suspected: Any = None
    ) -> None:
        self.receive, self.suspect = handler, on_peer_suspected

    def send(self, peer: str, message: m.Message) -> None:
        self.sent.append((peer, message))

    def _none(self, *_: Any, **__: Any) -> Any:
        """Does nothing."""

    cork = uncork = watch = forget = statistics = check = close = _none

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


def group(name: str) -> GroupInfo:
    rank = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), name, b"", local_prefill_tokens=128)
    role = name.rstrip("-2")
    return GroupInfo(name, role, 1, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", (rank,))


class Setting:
    """A router, its requests, and the leaders' side of their sessions."""

    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.channel = Channel()
        self.dispatcher = ResponseDispatcher(self.channel, asyncio.get_running_loop())
        self.dispatcher.start()
        self.router = Router(self.dispatcher, map(group, names), config=CONFIG, clock=lambda: self.now_s)
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.reports: dict[str, SessionReport] = {}
        self.outputs: dict[str, list[Output]] = {}

    async def ask(self, name: str, tokens: int, sampling: SamplingParams = SAMPLING) -> None:
        """Returns when the request was sent to a decode group."""
        report, outputs = self.reports[name], self.outputs[name] = SessionReport(), []
        request = RouterRequest(name, [1] * tokens, sampling, LIMIT_S, report=report)
        self.tasks[name] = asyncio.create_task(self.router.run(request, outputs.append))
        await self.sessions(name, 1)

    async def ask_all(self) -> None:
        """One prompt in the prefill group, and three in the queue of the decode group."""
        await self.ask("first", 150)
        for name in ("a", "b", "c"):
            await self.ask(name, 20)
        assert self.ways() == {"first": ["prefill"], "a": ["decode"], "b": ["decode"], "c": ["decode"]}
        self.router.check()

    def of(self, name: str, kind: type[m.Message]) -> list[tuple[str, Any]]:
        """The messages of this kind for a request, with their receivers."""
        sent = ((peer, message) for peer, message in self.channel.sent if isinstance(message, kind))
        return [(peer, message) for peer, message in sent if message.key.request_id == name]  # type: ignore

    def ways(self) -> dict[str, list[str]]:
        """The prefill group of each session of each request."""
        return {name: [one.prefill_group for _, one in self.of(name, m.Reserve)] for name in self.tasks}

    async def sessions(self, name: str, count: int) -> None:
        await until_async(lambda: len(self.of(name, m.Reserve)) == count, lambda: str(self.ways()))

    def compute(self, name: str, epoch: int = 0) -> None:
        """The ticket and the first token of a session."""
        decode, reserve = self.of(name, m.Reserve)[epoch]
        ticket = Ticket(reserve.key, 1, decode, Span(0, 1))
        self.channel.receive(decode, m.Reserved(reserve.key, ticket))
        self.channel.receive(reserve.prefill_group, m.Prefilled(reserve.key, [7 + epoch]))

    async def end(self, name: str, epoch: int = 0) -> None:
        """Answers the request's latest session, and confirms every release."""
        self.compute(name, epoch)
        key, (decode, _) = RequestKey(name, epoch), self.of(name, m.Reserve)[epoch]
        self.channel.receive(decode, m.Tokens(key, 1, [9], "length"))
        await until_async(lambda: any(message.key == key for _, message in self.of(name, m.Release)))
        for peer, message in self.of(name, m.Release):
            self.channel.receive(peer, m.Released(message.key))
        await self.tasks[name]

    async def until_one_moves(self) -> None:
        """The prefill group computes its prompt; returns when a prompt moves, before its next session begins."""
        self.compute("first")
        while not self.router.moved_prompts.total():
            await asyncio.sleep(0)  # one iteration of the loop

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs[name] for token in output.tokens]

    def check(self) -> None:
        """Asserts that nothing of an ended request is left."""
        self.router.check()
        assert self.dispatcher.receivers == {}
        for one in self.router.engines:
            counts = (one.requests, one.tokens, one.local_tokens, one.local_prompts, one.answering)
            assert counts == (0, 0, 0, 0, 0), one.group.name
        assert self.router.recoveries.total() == 0


@asynccontextmanager
async def setting_of(*names: str) -> AsyncIterator[Setting]:
    setting = Setting(*names)
    try:
        yield setting
    finally:
        for task in setting.tasks.values():
            task.cancel()
        for _, message in list(setting.channel.sent):
            if isinstance(message, m.Reserve):
                for leader in names:
                    setting.channel.receive(leader, m.Released(message.key))
        await asyncio.gather(*setting.tasks.values(), return_exceptions=True)


def run(work: Callable[[Setting], Awaitable[None]], *names: str) -> None:
    errors: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
        async with setting_of(*(names or ("prefill", "decode"))) as setting:
            await work(setting)

    asyncio.run(main())
    assert errors == [], "a callback of the event loop has failed"


HERE, MOVED = ["decode"], ["decode", "prefill"]


def test_prompts_move_when_the_prefill_group_has_computed_its_own() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.now_s = 30.0
        setting.compute("first")
        await setting.sessions("b", 2)
        assert setting.ways() == {"first": ["prefill"], "a": HERE, "b": MOVED, "c": MOVED}
        assert [one.key.request_id for _, one in setting.channel.sent if isinstance(one, m.Prefill)] == [
            "first",
            "c",
            "b",
        ]
        key = RequestKey("c", 1)
        (_, reserve), (_, prefill) = setting.of("c", m.Reserve)[1], setting.of("c", m.Prefill)[0]
        assert (reserve.key, reserve.answered, reserve.after, reserve.deadline_s) == (key, [], None, 970.0)
        assert (prefill.key, len(prefill.prompt), prefill.ticket) == (key, 20, None)
        order = [(type(one), one.key.epoch) for _, one in setting.channel.sent if one.key.request_id == "c"]  # type: ignore
        assert order.index((m.Release, 0)) < order.index((m.Reserve, 1)), "the group has room again"
        await until_async(lambda: setting.of("c", m.Release))
        assert [(to, one.key) for to, one in setting.of("c", m.Release)] == [("decode", RequestKey("c", 0))]
        setting.compute("c", 0)  # the group had begun to compute it
        setting.channel.receive("decode", m.Tokens(RequestKey("c", 0), 1, [3], "length"))
        for name, epoch in (("c", 1), ("b", 1), ("first", 0), ("a", 0)):
            await setting.end(name, epoch)
            assert setting.tokens(name) == [7 + epoch, 9]
            report = setting.reports[name]
            assert (report.recoveries, report.sessions, report.released) == ([], 1 + epoch, True)
        assert setting.reports["c"].prefill == "prefill"
        assert (setting.router.moved_prompts, setting.router.local_prefills) == ({"sooner": 2}, {"queue": 3})
        setting.check()

    run(work)


@pytest.mark.parametrize("why", ["suspected", "failed transfer"])
def test_no_prompt_moves_to_a_prefill_group_that_it_may_not_reach(why: str) -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        if why == "suspected":
            setting.channel.suspect("prefill", True)
            await until_async(lambda: setting.dispatcher.suspected)
        else:
            setting.router._shun(tuple(setting.router.engines))  # type: ignore  # noqa: SLF001 - as after a transfer
        setting.compute("first")
        await setting.end("a")
        assert setting.ways() == {"first": ["prefill"], "a": HERE, "b": HERE, "c": HERE}
        assert setting.router.moved_prompts == {}
        setting.channel.suspect("prefill", False)
        setting.now_s = 500.0  # the pair is tried again
        setting.dispatcher.on_change()
        await setting.sessions("c", 2)

    run(work)


def test_a_prompt_moves_to_the_shortest_queue_whatever_the_policy() -> None:
    async def work(setting: Setting) -> None:
        setting.router.choose = round_robin
        await setting.ask("first", 150)
        assert setting.ways() == {"first": ["prefill"]}
        setting.router.engines[0].tokens += 5000
        for name in ("a", "b", "c"):
            setting.router.engines[1].tokens = 200
            await setting.ask(name, 20)
        setting.router.engines[1].tokens, setting.router.engines[1].served = 0, 100
        assert setting.ways()["c"] == HERE
        setting.compute("a")
        await setting.sessions("c", 2)
        assert setting.ways()["c"] == ["decode", "prefill-2"]

    run(work, "prefill", "prefill-2", "decode")


def test_a_prompt_that_is_computed_at_the_same_time_stays() -> None:
    """Both messages arrive together: the second one is handled before the router reviews its prompts."""

    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.compute("first")
        setting.compute("c")
        await setting.sessions("b", 2)
        assert setting.ways()["c"] == HERE
        for name, epoch in (("c", 0), ("b", 1), ("first", 0), ("a", 0)):
            await setting.end(name, epoch)
            assert setting.tokens(name) == [7 + epoch, 9]
        setting.check()

    run(work)


def test_a_first_token_that_arrives_while_the_prompt_moves_is_ignored() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.compute("first")
        await asyncio.sleep(0)  # the router's next review is due, and the next message is behind it
        setting.compute("c")
        await asyncio.sleep(0)
        assert (setting.router.moved_prompts, setting.ways()["c"]) == ({"sooner": 1}, HERE)
        await setting.sessions("c", 2)
        await setting.end("c", 1)
        assert setting.tokens("c") == [8, 9]

    run(work)


def test_a_prefill_group_that_goes_while_a_prompt_moves_to_it() -> None:
    """The prompt returns to the decode group, and does not move again when there is a prefill group."""

    async def work(setting: Setting) -> None:
        await setting.ask_all()
        await setting.until_one_moves()
        assert setting.ways()["c"] == HERE
        setting.router.remove("prefill")
        await setting.sessions("c", 2)
        assert setting.ways()["c"] == ["decode", "decode"]
        assert setting.router.local_prefills == {"queue": 3, "no_prefill_group": 1}
        setting.router.add(group("prefill"))
        await setting.sessions("b", 2)
        assert setting.ways() == {"first": ["prefill"], "a": HERE, "b": MOVED, "c": ["decode", "decode"]}
        for name, epoch in (("a", 0), ("b", 1), ("c", 1)):
            await setting.end(name, epoch)
            assert setting.reports[name].recoveries == []

    run(work)


def test_a_moved_prompt_that_loses_its_prefill_group_is_recovered_and_does_not_move_again() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.compute("first")
        await setting.sessions("b", 2)
        setting.router.remove("prefill")
        for name in ("b", "c"):
            await setting.sessions(name, 3)
        setting.router.add(group("prefill"))
        await setting.ask("d", 20)
        assert setting.ways()["d"] == ["prefill"]
        setting.compute("d")
        await setting.end("a")
        await setting.end("d")
        assert setting.ways()["c"] == setting.ways()["b"] == [*MOVED, "decode"]
        for name in ("c", "b"):
            await setting.end(name, 2)
            assert setting.tokens(name) == [9, 9]

    run(work)


def test_prompts_move_to_a_prefill_group_that_returns() -> None:
    async def work(setting: Setting) -> None:
        setting.router.remove("prefill")
        for name in ("a", "b", "c"):
            await setting.ask(name, 20)
        assert setting.router.local_prefills == {"no_prefill_group": 3}
        setting.router.add(group("prefill"))
        await setting.sessions("b", 2)
        assert setting.ways() == {"a": HERE, "b": MOVED, "c": MOVED}
        for name, epoch in (("a", 0), ("b", 1), ("c", 1)):
            await setting.end(name, epoch)
        setting.check()

    run(work)


def test_a_client_that_leaves_while_its_prompt_waits() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.tasks["c"].cancel()
        await until_async(lambda: setting.of("c", m.Release))
        setting.router.check()
        setting.compute("first")
        await setting.sessions("b", 2)
        assert setting.router.moved_prompts == {"sooner": 1}

    run(work)


def test_a_session_that_fails_at_the_same_time_does_not_move() -> None:
    """Its task has not run yet when the router reviews the prompts; the next prompt moves."""

    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.compute("first")
        setting.channel.receive("decode", m.Failed(RequestKey("c"), "aborted", "by an operator", False))
        await setting.sessions("b", 2)
        await until_async(lambda: setting.of("c", m.Release))
        setting.channel.receive("decode", m.Released(RequestKey("c")))
        with pytest.raises(DisaggError, match="by an operator"):
            await setting.tasks["c"]
        assert (setting.ways()["c"], setting.router.moved_prompts) == (HERE, {"sooner": 1})

    run(work)


def test_a_client_that_leaves_while_its_prompt_moves() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        await setting.until_one_moves()
        setting.tasks["c"].cancel()
        await until_async(lambda: setting.of("c", m.Release))
        for peer, message in setting.of("c", m.Release):
            setting.channel.receive(peer, m.Released(message.key))
        await until_async(setting.tasks["c"].done)
        assert setting.tasks["c"].cancelled()
        assert setting.ways()["c"] == HERE
        await setting.sessions("b", 2)
        for name, epoch in (("a", 0), ("b", 1), ("first", 0)):
            await setting.end(name, epoch)
        setting.check()

    run(work)


def test_a_deadline_that_has_passed_when_a_prompt_moves() -> None:
    async def work(setting: Setting) -> None:
        await setting.ask_all()
        setting.now_s = LIMIT_S
        setting.compute("first")
        await until_async(lambda: len(setting.of("c", m.Release)) == 1)
        setting.channel.receive("decode", m.Released(RequestKey("c", 0)))
        with pytest.raises(RequestTimeoutError, match="did not end before its deadline"):
            await setting.tasks["c"]
        assert setting.ways()["c"] == HERE

    run(work)


def test_prompts_of_colocated_groups_do_not_move() -> None:
    async def work(setting: Setting) -> None:
        for name in ("a", "b", "c"):
            await setting.ask(name, 20)
        for name in ("a", "b", "c"):
            await setting.end(name)
        assert setting.router.moved_prompts == {}
        setting.check()

    run(work, "colocated")


@pytest.mark.parametrize("moved", [False, True])
def test_a_moved_prompt_stays_away_from_decode_groups_while_there_is_a_prefill_group(moved: bool) -> None:
    """A later session, after a loss, may meet a long queue."""

    async def work(setting: Setting) -> None:
        router = setting.router
        request = router._routing_request(pack_tokens([1] * 20), "", "", may_be_local=True)  # noqa: SLF001
        router.engines[0].tokens = 10_000
        pair = router._pair(request, "", frozenset(), moved=moved)  # noqa: SLF001
        assert pair[0].group.name == ("prefill" if moved else "decode")
        router.remove("prefill")
        assert router._pair(request, "", frozenset(), moved=moved)[0].group.name == "decode"  # noqa: SLF001

    run(work)


def test_a_group_that_failed_alone_is_avoided_though_it_has_cached_the_prompt() -> None:
    """While another decode group can compute it."""

    async def work(setting: Setting) -> None:
        router = setting.router
        prompt, kind = pack_tokens(range(64)), (16, 0)
        hashes = PrefixKey.of(prompt).block_hashes(16)
        request = RoutingRequest(64, block_hashes={kind: hashes}, may_be_local=True)
        holder = next(one for one in router.engines if one.group.name == "decode")
        holder.held.apply(Digest(None, 1, 16, pack_block_hashes(hashes), b""))
        assert router._pair(request, "", frozenset()) == (holder, holder)  # noqa: SLF001
        assert router.local_prefills == {"cached": 1}
        router._shun((holder, holder))  # noqa: SLF001
        assert router._pair(request, "", frozenset())[0] is not holder  # noqa: SLF001
        assert router.local_prefills == {"cached": 1}

    run(work, "prefill", "decode", "decode-2")
