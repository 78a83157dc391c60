"""The directory and routers that join it, in one process: groups are only said to be there."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from conditions import PATIENCE_S, until_async
from structlog.testing import capture_logs

from disagg.api.service import Service
from disagg.cluster.directory import Directory, directory_host
from disagg.commands.scale import scale
from disagg.core.config.read import ApiConfig, ControlConfig
from disagg.core.errors import ConfigError, DisaggError, PeerLostError
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Shard, Span
from disagg.router.follow import Follower, joined
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control import messages as m
from transport.control.inproc import InprocControl, InprocHub
from transport.control.reliable import ReliableOptions

SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.4)


def group(name: str, ranks: int = 1, addresses: str = "", **limits: int) -> GroupInfo:
    infos = tuple(
        RankInfo(rank, Shard(rank, Span(0, 1), Span(0, 1)), f"{addresses or name}/{rank}", b"")
        for rank in range(ranks)
    )
    role = name.partition("-")[0]
    return GroupInfo(name, role, 1, "model", KVLayout(1, 1, 8, "float32"), 16, "inproc", infos, **limits)


class DirectoryHarness:
    """A hub with a directory; `router` joins it."""

    def __init__(self) -> None:
        self.hub = InprocHub()
        self.leaders: dict[str, InprocControl] = {}
        self.directory = self.new_directory()

    def new_directory(self) -> Directory:
        directory = Directory(InprocControl(self.hub, "directory", SHORT))
        directory.start()
        return directory

    def tell(self, groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        """The groups' leaders live: they answer when asked for signs of life."""
        for address in {g.leader.control_address for g in groups} - self.leaders.keys():
            self.leaders[address] = InprocControl(self.hub, address, SHORT)
            self.leaders[address].start(lambda peer, message: None, lambda peer: None)
        self.directory.announce(groups, draining)

    def close(self) -> None:
        for channel in self.leaders.values():
            channel.close()
        self.directory.close()

    @asynccontextmanager
    async def router(self, name: str = "router") -> AsyncIterator[tuple[Router, ResponseDispatcher]]:
        dispatcher = ResponseDispatcher(InprocControl(self.hub, name, SHORT), asyncio.get_running_loop())
        dispatcher.start()
        try:
            router = Router(dispatcher)
            async with joined(
                dispatcher, router, "directory", lambda g: g.fingerprint == "model", retry_s=0.02
            ):
                yield router, dispatcher
        finally:
            dispatcher.close()


@pytest.fixture
def place() -> Iterator[DirectoryHarness]:
    place = DirectoryHarness()
    yield place
    place.close()


def names(router: Router) -> list[str]:
    return [engine.group.name for engine in router.engines]


def run(main: Coroutine[None, None, None]) -> None:
    asyncio.run(main)


def test_a_router_hears_of_groups_at_once_and_when_they_change(place: DirectoryHarness) -> None:
    async def main() -> None:
        place.tell([group("prefill")], [])
        async with place.router() as (router, _):
            assert router.missing() == ["decode", "prefill"], "not ready before it has heard"
            await until_async(lambda: names(router) == ["prefill"])
            assert router.missing() == ["decode"]
            place.tell([group("prefill"), group("decode"), group("decode-2")], [])
            await until_async(lambda: names(router) == ["prefill", "decode", "decode-2"])
            assert router.missing() == []
            async with place.router("second") as (second, _):
                await until_async(lambda: names(second) == names(router))

    run(main())


def limits_of(service: Service) -> tuple[int, int]:
    return service.status().max_running, service.model.context_tokens


def service_of(router: Router, **settings: int) -> Service:
    """A server's service over the router, with limits that follow the groups."""
    model: Any = SimpleNamespace(name="tiny", context_tokens=100_000)
    service = Service(router, model, ApiConfig(**settings))
    router.on_groups_changed(service.follow_groups)
    return service


def test_a_server_that_joins_has_the_limits_of_a_server_of_the_same_groups(place: DirectoryHarness) -> None:
    prefill = group("prefill", max_requests=256, context_tokens=4096)
    first = group("decode", max_requests=7, context_tokens=2048)
    second = group("decode-2", max_requests=9, context_tokens=1024)

    async def main() -> None:
        async with place.router() as (router, dispatcher):
            joining, given = service_of(router), service_of(router, max_running=3)
            router.on_groups_changed(lambda groups: [one.follow_groups(groups) for one in (joining, given)])
            assert limits_of(joining) == (0, 100_000), "no group is known"
            for groups, draining in (
                ([prefill, first], []),
                ([prefill, first, second], []),
                ([prefill, first, second], ["decode"]),
                ([prefill, second, first], []),
                ([prefill, second], []),
            ):
                place.tell(groups, draining)
                owned = service_of(Router(dispatcher, [one for one in groups if one.name not in draining]))
                await until_async(lambda owned=owned: limits_of(joining) == limits_of(owned))
                assert limits_of(given) == (3, limits_of(owned)[1])
            place.tell([prefill], [])
            await until_async(lambda: names(router) == ["prefill"])
            assert limits_of(joining) == (9, 4096), (
                "nothing decodes: the server refuses requests, its limit stays"
            )

    run(main())


def test_a_group_of_another_model_is_not_used(place: DirectoryHarness) -> None:
    async def main() -> None:
        other = msgspec.structs.replace(group("decode"), fingerprint="another")
        place.tell([group("prefill"), other], [])
        async with place.router() as (router, _):
            await until_async(lambda: names(router) == ["prefill"])

    run(main())


def test_a_group_drains_until_no_router_uses_it(place: DirectoryHarness) -> None:
    async def main() -> None:
        groups = [group("prefill"), group("decode"), group("decode-2")]
        place.tell(groups, [])
        async with place.router() as (router, _), place.router("idle") as (idle, _):
            await until_async(lambda: len(names(router)) == len(names(idle)) == 3)
            engine = next(e for e in router.engines if e.group.name == "decode-2")
            engine.requests = 1
            place.tell(groups, ["decode-2"])
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode-2"], 0.05)
            await until_async(lambda: names(idle) == ["prefill", "decode"])
            assert engine.draining
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode-2"], 0.05)
            engine.requests = 0
            assert await asyncio.to_thread(place.directory.wait_unused, ["decode-2"], PATIENCE_S)
            assert names(router) == ["prefill", "decode"]
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode"], 0.0)

    run(main())


def test_a_group_that_a_new_directory_does_not_drain_is_used_again(place: DirectoryHarness) -> None:
    """The launch was killed while it removed the group, and the next one has adopted it."""

    async def main() -> None:
        place.tell([group("prefill"), group("decode")], [])
        async with place.router() as (router, _):
            await until_async(lambda: not router.missing())
            engine = next(e for e in router.engines if e.group.name == "decode")
            engine.requests = 1
            place.tell([group("prefill"), group("decode")], ["decode"])
            await until_async(lambda: engine.draining)
            await asyncio.to_thread(place.directory.close)
            place.directory = place.new_directory()
            place.tell([group("prefill"), group("decode")], [])
            await until_async(lambda: not engine.draining)
            engine.requests = 0
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode"], 0.1)
            assert names(router) == ["prefill", "decode"]

    run(main())


def test_lists_in_quick_succession_drain_a_group_again(place: DirectoryHarness) -> None:
    """Both come in one turn of the event loop, before the first drain has noticed its end."""

    async def main() -> None:
        groups = [group("prefill"), group("decode")]
        place.tell(groups, [])
        async with place.router() as (router, _):
            await until_async(lambda: not router.missing())
            engine = next(e for e in router.engines if e.group.name == "decode")
            engine.requests = 1
            follower = Follower(router)
            follower.apply(groups, ["decode"])
            await until_async(lambda: engine.draining)
            follower.apply(groups, [])
            follower.apply(groups, ["decode"])
            engine.requests = 0
            await until_async(lambda: names(router) == ["prefill"])

    run(main())


def test_a_new_group_is_known_when_every_router_uses_it(place: DirectoryHarness) -> None:
    """A router that refuses it is named; one that is gone does not count."""

    async def known(*names: str, timeout_s: float = PATIENCE_S) -> tuple[str, ...]:
        return await asyncio.to_thread(place.directory.wait_known, names, timeout_s)

    async def main() -> None:
        place.tell([group("decode")], [])
        assert await known("decode") == (), "no router is connected"
        async with place.router() as (router, _), place.router("other") as (other, _):
            await until_async(lambda: len(place.directory.routers) == 2)
            assert await known("decode") == ()
            place.tell([group("decode"), group("decode-2")], [])
            assert await known("decode-2") == ()
            assert names(router) == names(other) == ["decode", "decode-2"], "both have applied the list"
            foreign = msgspec.structs.replace(group("decode-3"), fingerprint="another")
            place.tell([group("decode"), foreign], [])
            assert set(await known("decode-3", timeout_s=0.2)) == {"router", "other"}
            place.hub.cut("router")
            place.hub.cut("other")
            assert await known("decode-3") == ()

    run(main())


def test_a_router_that_is_gone_is_not_waited_for(place: DirectoryHarness) -> None:
    async def main() -> None:
        place.tell([group("decode")], [])
        async with place.router() as (router, _):
            await until_async(lambda: names(router) == ["decode"])
            router.engines[0].requests = 1
            place.tell([group("decode")], ["decode"])
            place.hub.cut("router")
            assert await asyncio.to_thread(place.directory.wait_unused, ["decode"], PATIENCE_S)
            assert place.directory.routers == ()

    run(main())


def test_a_router_that_leaves_says_so(place: DirectoryHarness) -> None:
    async def main() -> None:
        place.tell([group("decode")], [])
        async with place.router() as (router, _):
            await until_async(lambda: names(router) == ["decode"])
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode"], 0.0)
        place.hub.cut("router")
        began_s = time.monotonic()
        assert await asyncio.to_thread(place.directory.wait_unused, ["decode"], PATIENCE_S)
        assert time.monotonic() - began_s < SHORT.peer_timeout_s / 2, "before its silence was noticed"

    run(main())


def test_an_answer_to_older_news_hides_nothing(place: DirectoryHarness) -> None:
    """A router that has not heard of a group yet, but will, must be waited for."""
    place.hub.delay(m.Using)

    async def main() -> None:
        place.tell([], [])
        async with place.router() as (router, _):
            await until_async(lambda: place.directory.routers == ("router",))
            place.tell([group("decode")], [])
            await until_async(lambda: names(router) == ["decode"])
            place.hub.release()
            assert not await asyncio.to_thread(place.directory.wait_unused, ["decode"], 0.1)

    run(main())


def test_a_group_that_vanishes_ends_its_requests_and_its_addresses_may_come_back(
    place: DirectoryHarness,
) -> None:
    async def main() -> None:
        place.tell([group("prefill", 2), group("decode")], [])
        async with place.router() as (router, dispatcher):
            await until_async(lambda: not router.missing())
            with dispatcher.open(RequestKey("r")) as box:
                place.tell([group("decode")], [])
                async with asyncio.timeout(PATIENCE_S):
                    lost = {(await box.get())[0] for _ in range(2)}
            assert lost == {"prefill/0", "prefill/1"}
            assert router.missing() == ["prefill"]
            place.tell([group("decode"), group("prefill-2", 2, addresses="prefill")], [])
            await until_async(lambda: names(router) == ["decode", "prefill-2"])
            assert router.missing() == [], "the new group is not the one that died"

    run(main())


def test_a_lost_directory_is_asked_again_and_its_groups_are_used_on(place: DirectoryHarness) -> None:
    async def main() -> None:
        place.tell([group("prefill"), group("decode")], [])
        async with place.router() as (router, dispatcher):
            await until_async(lambda: not router.missing())
            await asyncio.to_thread(place.directory.close)
            await until_async(lambda: "directory" in dispatcher.lost)
            assert router.missing() == []
            place.directory = place.new_directory()
            place.tell([group("decode"), group("prefill-7")], [])
            await until_async(lambda: names(router) == ["decode", "prefill-7"])

    run(main())


def test_a_directory_that_starts_says_nothing_of_groups_before_it_has_found_them(
    place: DirectoryHarness,
) -> None:
    """A new launch adopts groups after its directory is up: an empty list would end their requests."""

    async def main() -> None:
        place.tell([group("prefill")], [])
        async with place.router() as (router, _):
            await until_async(lambda: names(router) == ["prefill"])
            with capture_logs() as lines:
                await asyncio.to_thread(place.directory.close)
                place.directory = place.new_directory()
                await until_async(lambda: bool(place.directory.routers))
                place.tell([group("prefill"), group("decode")], [])
                await until_async(lambda: names(router) == ["prefill", "decode"])
            assert "group_gone" not in [line["event"] for line in lines]

    run(main())


def test_scaling_is_asked_for_role_by_role_and_errors_come_back(place: DirectoryHarness) -> None:
    asked: list[tuple[str, int]] = []

    def scale_to(role: str, count: int, done: Callable[[str], None]) -> None:
        asked.append((role, count))
        answer = threading.Timer(0.01, done, ["no room" if count > 2 else ""])
        answer.start()

    def ask(name: str, **counts: int) -> None:
        control = InprocControl(place.hub, name, SHORT)
        try:
            scale(control, "directory", counts)  # type: ignore[arg-type]
        finally:
            control.close()

    with pytest.raises(DisaggError, match=r"decode=2: the cluster is still starting"):
        ask("early", decode=2)
    place.directory.on_scale(scale_to)
    ask("operator", decode=2, prefill=1)
    with pytest.raises(DisaggError, match=r"decode=3: no room"):
        ask("greedy", decode=3, prefill=2)
    assert asked == [("decode", 2), ("prefill", 1), ("decode", 3)]
    place.hub.cut("directory")
    with pytest.raises(PeerLostError, match="no directory answers at directory"):
        ask("alone", decode=1)


@pytest.mark.parametrize(
    "address", ["127.0.0.1:5570", "tcp://127.0.0.1", "tcp://:1", "tcp://h:0", "tcp://[::1]:5"]
)
def test_an_address_that_is_none(address: str) -> None:
    with pytest.raises(ConfigError, match=r"write tcp://HOST:PORT"):
        directory_host(address, ControlConfig())


def test_who_cannot_be_answered_is_told_so() -> None:
    assert directory_host("tcp://127.0.0.1:5570", ControlConfig()) == "127.0.0.1"
    assert directory_host("tcp://node-3:5570", ControlConfig(host="10.0.0.1")) == "node-3"
    with pytest.raises(ConfigError, match=r"control.host = 127.0.0.1 cannot be reached from 10.9.9.9"):
        directory_host("tcp://10.9.9.9:5570", ControlConfig())
