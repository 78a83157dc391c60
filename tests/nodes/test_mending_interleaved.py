"""Two living ranks whose connections break again and again, in every order of their threads: by a seed.

Each rank has the real `Mending`, `Silences` and `ActiveMessages`. The seed chooses when the control thread receives,
when the transfer thread takes its next piece of work or looks at the wire, and what breaks.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from slow_parameters import sampled

from disagg.core.errors import TransportError
from disagg.core.types import GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.node.mending import LONGEST_PAUSE_S, Mending
from disagg.node.silence import Silences
from transport.active_messages import ActiveMessages
from transport.control import messages as m
from transport.inproc import InprocFabric, InprocTransport

STEPS = 300
LOST: Any = object()
"""In the queue of a control thread: its channel has lost the peer."""
SEEDS = sampled(range(2000), lambda seed: seed < 200)


class Side:
    """One rank: a control thread, a transfer thread, and what its peer sends."""

    def __init__(self, fabric: InprocFabric, name: str, other: str, choose: random.Random) -> None:
        self.name, self.other_name, self.choose, self.now_s = name, other, choose, 100.0
        self.other: Side = self
        self.transport = InprocTransport(fabric, name)
        self.silences = Silences()
        info = RankInfo(0, Shard(0, Span(0, 1), Span(0, 1)), other, other.encode())
        self.group = GroupInfo(other, "decode", 3, "f", KVLayout(1, 2, 8, "float32"), 16, "x", (info,))
        self.arriving: deque[tuple[m.Message, bool]] = deque()
        """Each with whether the control channel of its sender had met this rank."""
        self.inbox: deque[Callable[[], None]] = deque()
        self.lost = False
        """The channel is broken, and the control thread has not noticed."""
        self.meets = True
        """The control channel has met the peer since its last loss."""
        self.active_messages = ActiveMessages(
            self.transport, self._send, {m.Watermark: self._received}, self._undelivered
        )
        self.mending = Mending(
            self.silences,
            name,
            fence=self._fence,
            send=self._send,
            link=self._link,
            linked=self.active_messages.on_linked,
            clock=lambda: self.now_s,
        )
        self.links_fail = 0.0
        """Part of the links that fail."""
        self.fences = 0
        self.sent: set[int] = set()
        """Messages that neither arrived nor failed since the last fence."""
        self.left: dict[int, int] = {}
        """The fences of the other side when each message left this one."""
        fabric.observe(self._on_wire)

    def link(self) -> None:
        assert self._link(self.group)
        self.links_fail = 0.1
        self.silences.linked(self.group, [self.other_name])

    def _link(self, group: GroupInfo) -> bool:
        if self.choose.random() < self.links_fail:
            return False
        self.transport.connect(self.other_name, self.other_name.encode())
        self.active_messages.link(self.other_name)
        return True

    def _fence(self, peer: str) -> None:
        self.fences += 1
        self.active_messages.forget(peer)
        self.transport.disconnect(peer)
        self.sent.clear()  # their requests end

    def _send(self, peer: str, message: m.Message) -> None:
        if not self.lost:  # else it belongs to a stream that has ended
            self.other.arriving.append((message, self.meets))

    # --- what can happen

    def actions(self) -> list[Callable[[], None]]:
        found = [self.look, self.turn, self.send_message]
        found += [self.control] if self.arriving or self.lost else []
        found += [self.met] if not self.meets and not self.lost and not self.other.lost else []
        found += [self.work] if self.inbox else []
        return found

    def control(self) -> None:
        """The control thread handles the next event."""
        if self.lost:
            self.lost = self.meets = False
            self.inbox.append(partial(self.mending.on_silent, self.other_name))
            return
        message, after_met = self.arriving.popleft()
        if after_met and not self.meets:
            self.met()  # the message acknowledges this side's stream
        handler: Any = {m.LinkBroken: self.mending.on_link_broken, m.Linked: self.mending.on_linked}[
            type(message)
        ]
        self.inbox.append(partial(handler, self.other_name, message))

    def met(self) -> None:
        self.meets = True
        self.inbox.append(partial(self.mending.on_met, self.other_name))

    def work(self) -> None:
        if self.inbox:
            self.inbox.popleft()()

    def look(self) -> None:
        for peer in self.transport.lost_peers():
            self.mending.on_connection_lost(peer)
        self.mending.look()

    def turn(self) -> None:
        """The transfer thread drives its transport."""
        for operation in self.transport.progress():
            self.active_messages.ended(operation)
        for arrival in self.transport.arrivals():
            assert self.active_messages.arrived(arrival)

    def send_message(self) -> None:
        """A message whose loss would leave a request waiting, if this rank is linked."""
        if self.active_messages.is_linked(self.other_name):
            number = self.choose.randrange(1 << 40)
            self.sent.add(number)
            self.active_messages.send(self.other_name, m.Watermark(0, number, 1 << 20))

    def _on_wire(self, source: str, destination: str, tag: int, data: torch.Tensor) -> None:
        if source == self.name:
            message = m.decode(data.numpy().tobytes())
            assert isinstance(message, m.Watermark)
            self.left[message.watermark] = self.other.fences

    def _received(self, peer: str, message: m.Watermark) -> None:
        self.other.sent.discard(message.watermark)
        assert self.other.left[message.watermark] == self.fences, (
            "a message from before a fence is handled after it"
        )

    def _undelivered(self, peer: str, message: m.Message, error: TransportError) -> None:
        assert isinstance(message, m.Watermark)
        self.sent.discard(message.watermark)


def break_control(sides: tuple[Side, Side]) -> None:
    """Both channels lose each other, each at its own time; nothing of their streams arrives any more."""
    for side in sides:
        side.lost = True
        side.arriving.clear()


def run(seed: int) -> tuple[Side, Side]:
    choose = random.Random(seed)
    fabric = InprocFabric()
    a, b = sides = Side(fabric, "a", "b", choose), Side(fabric, "b", "a", choose)
    a.other, b.other = b, a
    for side in sides:
        side.link()
    slow = {id(side): choose.choice([1.0, 1.0, 0.1]) for side in sides}
    for _ in range(STEPS):
        if choose.random() < 0.03:
            one, other = choose.sample(sides, 2)
            fabric.sever(one.name, other.name)
        if choose.random() < 0.01:
            break_control(sides)
        for side in sides:
            side.now_s += choose.choice([0.0, 0.0, LONGEST_PAUSE_S])
        actions = [(action, slow[id(side)]) for side in sides for action in side.actions()]
        choose.choices([action for action, _ in actions], [weight for _, weight in actions])[0]()
    return sides


@pytest.mark.parametrize("seed", SEEDS)
def test_every_message_arrives_or_its_sender_fences(seed: int) -> None:
    """In the end both are linked, and messages pass both ways."""
    sides = run(seed)
    for side in sides:
        side.links_fail = 0.0
    for _ in range(60):
        for side in sides:
            side.now_s += LONGEST_PAUSE_S
            for action in side.actions():
                if action != side.send_message:
                    action()
    for side in sides:
        assert not side.sent, f"{side.name} waits for an answer to a message that is lost"
        assert not side.silences.silent
        side.send_message()
        assert side.sent
    for _ in range(3):
        for side in sides:
            side.turn()
    assert not any(side.sent for side in sides)
