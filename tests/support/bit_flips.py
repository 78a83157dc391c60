"""Inverts single bits of segments: in a decode rank's ring, behind the wire, or in its pool, behind a peer's write.

`Flips.choose` says for each sending of a segment which bit to invert, if any. Every damage is noted.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

import decode_node.verifier
from decode_node.incoming import IncomingSegment, IncomingTransfer
from decode_node.receive_state import SegmentEvent
from decode_node.ring import ReceiveRing
from decode_node.verifier import Verifier
from disagg.core.types import CHECKSUM_BYTES, Segment
from transport.base import Arrival, Operation, Transport
from transport.completion_notifications import Written
from transport.tags import is_active_message

Choose = Callable[[IncomingTransfer, Segment, bool], int | None]
"""`choose(incoming, segment, again)`: a bit of the segment to invert; negative: a bit of its checksum; None: none."""


def first_sendings(seed: int, trailer: bool = False) -> Choose:
    """A random bit of every segment when it comes for the first time; or of its checksum."""
    generator = random.Random(seed)

    def choose(incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        if again:
            return None
        return -1 - generator.randrange(64) if trailer else generator.randrange(8 * segment.nbytes)

    return choose


@dataclass
class Flips:
    """What was damaged; for all decode ranks of this process."""

    choose: Choose
    struck: list[tuple[Segment, bool]] = field(default_factory=list)
    """Each segment, and whether it came for the second time."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def bit(self, incoming: IncomingTransfer, segment: Segment, again: bool) -> int | None:
        with self.lock:
            bit = self.choose(incoming, segment, again)
            if bit is not None:
                self.struck.append((segment, again))
            return bit


def install(patch: pytest.MonkeyPatch, choose: Choose) -> Flips:
    """From now on segments that come to decode ranks are damaged as `choose` says."""
    flips = Flips(choose)
    begin, slice_of, in_pool = Verifier.begin, decode_node.verifier.pool_slice, threading.local()

    def damage(ring: ReceiveRing, item: IncomingSegment) -> None:
        bit = flips.bit(item.incoming, item.segment, item.again)
        if bit is not None:
            message = ring.view(item)
            invert(message[: item.segment.nbytes] if bit >= 0 else message[-CHECKSUM_BYTES:], bit)

    def damaged_slice(*arguments: Any) -> Any:
        """The pool's rows that `begin` sums."""
        place = slice_of(*arguments)
        if in_pool.bit is not None:
            invert_in_pool(place, in_pool.bit)
        return place

    def begin_damaged(self: Verifier, incoming: IncomingTransfer, written: Written) -> None:
        bit = flips.bit(incoming, written.segment, written.again)
        in_pool.bit = bit if bit is not None and bit >= 0 else None
        if bit is not None and bit < 0:
            total = written.total ^ (1 << (-1 - bit) % 63)
            written = Written(written.segment, total, written.again)
        begin(self, incoming, written)

    before_scatters(patch, damage)
    patch.setattr(Verifier, "begin", begin_damaged)
    patch.setattr(decode_node.verifier, "pool_slice", damaged_slice)
    return flips


def before_scatters(
    patch: pytest.MonkeyPatch, change: Callable[[ReceiveRing, IncomingSegment], None]
) -> None:
    """Calls `change` with each segment that has been received, before its scatter."""
    advance = ReceiveRing.advance

    def received(self: ReceiveRing, item: IncomingSegment, event: SegmentEvent) -> None:
        if event is SegmentEvent.RECEIVED:
            change(self, item)
        advance(self, item, event)

    patch.setattr(ReceiveRing, "advance", received)


def invert(memory: torch.Tensor, bit: int) -> None:
    """One bit of `memory`, uint8 `[n]`; negative ones from the end."""
    memory[bit // 8] ^= 1 << bit % 8


def invert_in_pool(place: Any, bit: int) -> None:
    """One bit of the rows of `place`, counted as if they were contiguous `[layer, plane, token, head, head_dim]`."""
    memory = place.pool.view(torch.uint8)
    shape = (len(place.layers), memory.shape[1], len(place.slots), len(place.heads), memory.shape[4])
    at, index = bit // 8, []
    for size in reversed(shape):
        at, rest = divmod(at, size)
        index.append(rest)
    head_byte, head, token, plane, layer = index
    where = (
        place.layers.start + layer,
        plane,
        int(place.slots[token]),
        place.heads.start + head,
        head_byte,
    )
    memory[where] ^= 1 << bit % 8


class FlippingTransport:
    """Any transport; of each data message that comes for the first time one bit is inverted as it arrives."""

    def __init__(self, inner: Transport, seed: int) -> None:
        self._inner, self._choose = inner, random.Random(seed)
        self._seen: set[int] = set()
        self._damaged: dict[Operation, torch.Tensor] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def receive(self, peer: str, arrival: Arrival, into: torch.Tensor, context: object = None) -> Operation:
        operation = self._inner.receive(peer, arrival, into, context)
        if not is_active_message(arrival.tag) and arrival.tag not in self._seen:
            self._seen.add(arrival.tag)
            self._damaged[operation] = into
        return operation

    def progress(self) -> list[Operation]:
        ended = self._inner.progress()
        for operation in ended:
            into = self._damaged.pop(operation, None)
            if into is not None:
                invert(into, self._choose.randrange(8 * into.numel()))
        return ended
