"""What the channel's thread passes to the loop: one wake-up for many messages, in order, and each on its own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from conditions import until_async

from disagg.core.errors import PeerLostError
from disagg.core.types import RequestKey
from disagg.router.response_dispatcher import ResponseDispatcher
from transport.control import messages as m
from transport.control.base import ControlChannel

ONE, TWO = RequestKey("one"), RequestKey("two")


class Channel(ControlChannel):
    """A channel whose thread is the test."""

    address = "router"

    def start(
        self, handler: Any, on_peer_lost: Any, on_peer_met: Any = None, on_peer_suspected: Any = None
    ) -> None:
        self.handler, self.on_lost, self.on_suspected = handler, on_peer_lost, on_peer_suspected

    def _none(self, *_: Any, **__: Any) -> Any:
        """Does nothing."""

    send = cork = uncork = watch = forget = statistics = check = close = _none

    def call_soon(self, callback: Callable[[], None]) -> None:
        callback()


class CountedLoop:
    """An event loop that counts the wake-ups from other threads."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.wakes = 0

    def call_soon_threadsafe(self, callback: Callable[..., None], *arguments: Any) -> None:
        self.wakes += 1
        self._loop.call_soon(callback, *arguments)

    def call_soon(self, callback: Callable[..., None]) -> None:
        self._loop.call_soon(callback)


def test_one_wake_up_takes_all_messages_in_order() -> None:
    async def main() -> None:
        channel, loop = Channel(), CountedLoop()
        dispatcher = ResponseDispatcher(channel, loop)  # type: ignore[arg-type]
        dispatcher.start()
        found: list[tuple[str, Any]] = []
        receive = lambda peer, message: found.append((peer, message))  # noqa: E731
        with dispatcher.receiving(ONE, receive), dispatcher.receiving(TWO, receive):
            steps = [m.StepTokens([m.Tokens(ONE, at, [at]), m.Tokens(TWO, at, [at])]) for at in range(3)]
            for step in steps:
                channel.handler("leader", step)
            channel.on_lost("leader")
            channel.handler("other", m.Released(ONE))
            await asyncio.sleep(0)
            assert loop.wakes == 1
            *tokens, lost_one, lost_two, released = [message for _, message in found]
            assert tokens == [one for step in steps for one in step.tokens]
            assert all(isinstance(one, PeerLostError) for one in (lost_one, lost_two))
            assert released == m.Released(ONE)
            channel.handler("leader", steps[0])
            await asyncio.sleep(0)
            assert loop.wakes == 2
        channel.handler("leader", steps[0])
        await asyncio.sleep(0)
        assert dispatcher.unclaimed == 2

    asyncio.run(main())


def test_the_loop_is_woken_at_the_end_of_the_channel_s_turn() -> None:
    async def main() -> None:
        class Turn(Channel):
            def call_soon(self, callback: Callable[[], None]) -> None:
                calls.append(callback)

        calls: list[Callable[[], None]] = []
        channel, loop = Turn(), CountedLoop()
        dispatcher = ResponseDispatcher(channel, loop)  # type: ignore[arg-type]
        dispatcher.start()
        for _ in range(3):
            channel.handler("leader", m.Released(ONE))
        assert (len(calls), loop.wakes) == (1, 0), "the channel still handles messages"
        calls.pop()()
        assert loop.wakes == 1
        await asyncio.sleep(0)
        assert dispatcher.unclaimed == 3

    asyncio.run(main())


def test_a_message_that_fails_does_not_keep_the_next_ones() -> None:
    reported: list[str] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(
            lambda loop, context: reported.append(str(context["exception"]))
        )
        channel = Channel()
        dispatcher = ResponseDispatcher(channel, asyncio.get_running_loop())
        dispatcher.start()
        found: list[Any] = []

        def fail(message: Any) -> None:
            raise ValueError("a bug of a listener")

        dispatcher.listen("bad", fail)
        with dispatcher.receiving(ONE, lambda peer, message: found.append(message)):
            channel.handler("bad", m.Using(1, []))
            channel.handler("good", m.Released(ONE))
            await until_async(lambda: found)
        assert found == [m.Released(ONE)]

    asyncio.run(main())
    assert reported == ["a bug of a listener"]
