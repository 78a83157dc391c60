"""Groups that a router suspects: when, what moves, and when they are used again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from disagg.core.status import GroupStatus
from disagg.core.tokens import pack_tokens
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Shard, Span
from disagg.router.response_dispatcher import ResponseDispatcher, Suspicion
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.base import ControlChannel

KEY = RequestKey("r")
NAMES = ("prefill", "prefill-2", "decode", "decode-2")


class Channel(ControlChannel):
    """A channel whose thread is the test."""

    address = "router"

    def start(
        self, handler: Any, on_peer_lost: Any, on_peer_met: Any = None, on_peer_suspected: Any = None
    ) -> None:
        self.handler, self.on_lost = handler, on_peer_lost
        self.on_met, self.on_suspected = on_peer_met, on_peer_suspected

    def _none(self, *_: Any, **__: Any) -> Any:
        """Does nothing."""

    send = cork = uncork = watch = forget = statistics = check = close = _none

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


class Loop:
    """Runs a wake-up at once."""

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        callback(*arguments)

    def call_soon(self, callback: Callable[..., None], *arguments: Any) -> None:
        callback(*arguments)


def group(name: str) -> GroupInfo:
    ranks = tuple(
        RankInfo(rank, Shard(rank, Span(0, 1), Span(0, 1)), f"{name} r{rank}", b"") for rank in range(2)
    )
    return GroupInfo(name, name.split("-")[0], 1, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", ranks)


class Setting:
    """A router with two groups of each role and a session that all events reach."""

    def __init__(self, *names: str) -> None:
        self.channel = Channel()
        self.dispatcher = ResponseDispatcher(self.channel, Loop())  # type: ignore[arg-type]
        self.dispatcher.start()
        self.router = Router(self.dispatcher, map(group, names or NAMES))
        self.moved: list[str] = []
        """Leaders of groups whose sessions were to leave."""

    @contextmanager
    def session(self) -> Iterator[None]:
        with self.dispatcher.receiving(KEY, self._receive):
            yield

    def _receive(self, peer: str, message: Any) -> None:
        if isinstance(message, Suspicion):
            self.moved.append(peer)

    def usable(self, role: str) -> list[str]:
        return [engine.group.name for engine in self.router._table.usable(role)]  # noqa: SLF001

    def report(self, name: str, *silent: int) -> None:
        """The leader reports which of its ranks are silent."""
        status = GroupStatus(name, group(name).role, silent_ranks=silent)  # type: ignore[arg-type]
        self.channel.handler(f"{name} r0", m.GroupReport(status))


@pytest.fixture
def setting() -> Iterator[Setting]:
    setting = Setting()
    setting.router.statuses.renew(1.0)
    with setting.session():
        yield setting


def test_a_silent_leader_suspends_its_group_until_it_speaks(setting: Setting) -> None:
    setting.channel.on_suspected("decode r0", True)
    assert setting.moved == ["decode r0"]
    assert (setting.usable("decode"), setting.usable("prefill")) == (["decode-2"], ["prefill", "prefill-2"])
    assert setting.router.suspected() == ("decode",)
    assert setting.router.missing() == []
    setting.channel.on_suspected("decode r0", False)
    assert setting.usable("decode") == ["decode", "decode-2"]
    assert (setting.router.suspected(), setting.router.suspicions) == ((), {"decode": 1})
    setting.channel.on_suspected("decode r0", True)
    assert setting.router.suspicions == {"decode": 2}


def test_a_leader_that_reports_a_silent_rank_suspends_its_group(setting: Setting) -> None:
    setting.report("prefill-2")
    assert setting.router.suspected() == ()
    setting.report("prefill-2", 1)
    assert (setting.moved, setting.usable("prefill")) == (["prefill-2 r0"], ["prefill"])
    setting.report("prefill-2", 1)
    assert setting.moved == ["prefill-2 r0"], "nothing has changed"
    setting.report("prefill-2")
    assert setting.usable("prefill") == ["prefill", "prefill-2"]


def test_requests_stay_with_a_suspected_group_while_there_is_no_other(setting: Setting) -> None:
    setting.channel.on_suspected("decode r0", True)
    setting.moved.clear()
    setting.channel.on_suspected("decode-2 r0", True)
    assert (setting.moved, setting.usable("decode")) == ([], ["decode", "decode-2"])
    setting.channel.on_suspected("decode r0", False)
    assert (setting.moved, setting.usable("decode")) == (["decode-2 r0"], ["decode"]), (
        "now there is another one"
    )


def test_requests_leave_a_suspected_group_when_another_comes_up() -> None:
    setting = Setting("prefill", "decode")
    with setting.session():
        setting.channel.on_suspected("prefill r0", True)
        assert (setting.moved, setting.usable("prefill")) == ([], ["prefill"])
        setting.router.add(group("prefill-2"))
        assert (setting.moved, setting.usable("prefill")) == (["prefill r0"], ["prefill-2"])


def test_requests_leave_a_suspected_group_when_a_lost_one_returns(setting: Setting) -> None:
    setting.channel.on_lost("decode-2 r0")
    setting.channel.on_suspected("decode r0", True)
    assert setting.moved == []
    setting.channel.on_met("decode-2 r0")
    assert setting.moved == ["decode r0"]


def test_groups_of_both_roles_are_left(setting: Setting) -> None:
    setting.channel.on_suspected("prefill r0", True)
    setting.channel.on_suspected("decode-2 r0", True)
    assert set(setting.moved) == {"prefill r0", "decode-2 r0"}
    assert (setting.usable("prefill"), setting.usable("decode")) == (["prefill-2"], ["decode"])


def test_a_draining_group_is_no_other_group(setting: Setting) -> None:
    setting.router._table.set_draining(setting.router.engines[3], True)  # noqa: SLF001
    setting.channel.on_suspected("decode r0", True)
    assert (setting.moved, setting.usable("decode")) == ([], ["decode"])


def test_the_loss_of_a_suspected_group_ends_the_suspicion(setting: Setting) -> None:
    setting.channel.on_suspected("decode r0", True)
    setting.channel.on_lost("decode r0")
    assert (setting.router.suspected(), setting.usable("decode")) == ((), ["decode-2"])
    setting.channel.on_met("decode r0")
    assert setting.usable("decode") == ["decode", "decode-2"]
    setting.router.remove("decode")
    setting.router.add(group("decode"))
    assert setting.usable("decode") == ["decode-2", "decode"]


def test_the_silence_of_the_directory_is_no_suspicion(setting: Setting) -> None:
    setting.dispatcher.watch("directory")
    setting.channel.on_suspected("directory", True)
    assert (setting.router.suspected(), setting.moved) == ((), [])


def test_a_suspected_group_is_silent_for_the_count_of_faults(setting: Setting) -> None:
    """So the later loss of the same group, or of the others to a router that is cut off, counts once."""
    setting.channel.on_suspected("decode r0", True)
    assert setting.router._silent_groups(NAMES) == {"decode"}  # noqa: SLF001


def test_a_pair_has_no_suspected_group(setting: Setting) -> None:
    setting.channel.on_suspected("prefill r0", True)
    setting.channel.on_suspected("decode r0", True)
    request = setting.router._routing_request(pack_tokens([1]), "", "")  # noqa: SLF001
    pair = setting.router._pair(request, "decode", frozenset())  # noqa: SLF001
    assert [engine.group.name for engine in pair] == ["prefill-2", "decode-2"]
