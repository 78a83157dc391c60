"""Whether a router has whole groups of both roles, and so whether requests can be served; ids in use."""

from __future__ import annotations

import asyncio

import pytest
from conditions import PATIENCE_S, until_async

from disagg.api.errors import api_error
from disagg.core.errors import RequestInUseError
from disagg.core.status import GroupStatus
from disagg.core.types import GroupInfo, KVLayout, RankInfo, RequestKey, Shard, Span
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching
from transport.control import messages as m
from transport.control.inproc import InprocControl, InprocHub


def group(role: str, ranks: int) -> GroupInfo:
    infos = tuple(
        RankInfo(rank, Shard(rank, Span(0, 1), Span(0, 1)), f"{role}-{rank}", b"") for rank in range(ranks)
    )
    return GroupInfo(role, role, 1, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", infos)


def test_a_group_that_lost_any_rank_is_missing() -> None:
    async def main() -> None:
        dispatcher = ResponseDispatcher(InprocControl(InprocHub(), "router"), asyncio.get_running_loop())
        dispatcher.start()
        try:
            router = Router(dispatcher, [group("prefill", 2), group("decode", 1)])
            assert router.missing() == []
            dispatcher.lose("somebody else")
            assert router.missing() == []
            dispatcher.lose("prefill-1")
            assert router.missing() == ["prefill"]
            dispatcher.lose("decode-0")
            assert router.missing() == ["decode", "prefill"]
        finally:
            dispatcher.close()

    asyncio.run(main())


def test_a_group_whose_report_says_broken_is_missing() -> None:
    async def main() -> None:
        hub = InprocHub()
        dispatcher = ResponseDispatcher(InprocControl(hub, "router"), asyncio.get_running_loop())
        dispatcher.start()
        leader = InprocControl(hub, "decode-0")
        watched = asyncio.Event()
        loop = asyncio.get_running_loop()
        leader.start(lambda peer, message: loop.call_soon_threadsafe(watched.set), lambda peer: None)
        try:
            router = Router(dispatcher, [group("prefill", 1), group("decode", 1)])
            async with asyncio.timeout(PATIENCE_S), watching(router.statuses, 60.0):
                await watched.wait()
                leader.send("router", m.GroupReport(GroupStatus("decode", "decode", broken="a step failed")))
                await until_async(router.missing)
                assert router.missing() == ["decode"]
        finally:
            leader.close()
            dispatcher.close()

    asyncio.run(main())


def test_a_request_id_in_use_is_refused() -> None:
    async def main() -> None:
        dispatcher = ResponseDispatcher(InprocControl(InprocHub(), "router"), asyncio.get_running_loop())
        dispatcher.start()
        try:
            with dispatcher.open(RequestKey("one")):
                refused = pytest.raises(RequestInUseError, match="request id 'one' is in use")
                with refused as caught, dispatcher.open(RequestKey("one")):
                    pass
                with dispatcher.open(RequestKey("two")):
                    pass
            with dispatcher.open(RequestKey("one")):
                pass
            error = api_error(caught.value)
            assert (error.status, error.code, caught.value.exit_code) == (409, "request_in_use", 2)
        finally:
            dispatcher.close()

    asyncio.run(main())


def test_a_colocated_group_is_all_that_a_request_needs() -> None:
    async def main() -> None:
        dispatcher = ResponseDispatcher(InprocControl(InprocHub(), "router"), asyncio.get_running_loop())
        dispatcher.start()
        try:
            router = Router(dispatcher, [group("colocated", 2)])
            assert router.missing() == []
            dispatcher.lose("colocated-1")
            assert router.missing() == ["colocated"]
            router.remove("colocated")
            assert router.missing() == ["colocated"], "what is missed does not change with the loss"
        finally:
            dispatcher.close()

    asyncio.run(main())


def test_the_choice_of_groups_follows_every_change() -> None:
    """Groups are looked up in a table that is computed for each change: a draining, lost or new group must show."""

    def named(name: str, role: str) -> GroupInfo:
        rank = RankInfo(
            0, Shard(0, Span(0, 1), Span(0, 1)), f"{name} 0", b"", max_sequences=4, pool_tokens=640
        )
        return GroupInfo(name, role, 1, "", KVLayout(1, 1, 8, "float32"), 16, "inproc", (rank,))

    async def main() -> None:
        dispatcher = ResponseDispatcher(InprocControl(InprocHub(), "router"), asyncio.get_running_loop())
        dispatcher.start()
        try:
            router = Router(dispatcher, [named("p", "prefill"), named("d", "decode")])
            used: list[tuple[str, ...]] = []
            router.on_groups_changed(lambda groups: used.append(tuple(group.name for group in groups)))
            assert (router.missing(), router.max_sequences(16, 16)) == ([], 4)
            decode = next(engine for engine in router.engines if engine.group.name == "d")
            decode.requests = 1
            draining = asyncio.create_task(router.drain("d"))
            await asyncio.sleep(0)
            assert (router.missing(), router.draining()) == (["decode"], ("d",))
            router.add(named("d2", "decode"))
            assert router.missing() == []
            dispatcher.lose("d2 0")
            assert router.missing() == ["decode"]
            draining.cancel()
            await asyncio.wait([draining])
            assert (router.missing(), router.draining()) == ([], ())
            router.remove("d")
            assert router.missing() == ["decode"]
            dispatcher.revive(["d2 0"])
            assert router.missing() == []
            assert used == [("p", "d"), ("p",), ("p", "d2"), ("p", "d", "d2"), ("p", "d2")]
        finally:
            dispatcher.close()

    asyncio.run(main())
