"""A decode rank's ring: leases for the segments that will come, and word to those who wait for room.

A region is used again only when nothing can write it any more: the receive has ended and the scatter's event has
completed (`free`, by `decode_node.landing`), or there was and will be no receive, for the sender said so or is fenced
(`drop`). A probe takes and frees what it needs by itself (`decode_node.probe`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import torch

from decode_node.incoming import Incoming, Item, State
from decode_node.tickets import Tickets
from disagg.core.errors import InvariantError, ProtocolError, TransportError
from disagg.core.ports import Clock
from disagg.core.types import Segment
from staging.allocator import Lease, StagingAllocator
from staging.buffer import StagingBuffer
from staging.trailer import message_bytes
from transport import messages as m


class Ring:
    """`size_bytes` of memory on a device. Owned by the transfer thread."""

    def __init__(
        self,
        rank: int,
        size_bytes: int,
        device: torch.device,
        tickets: Tickets,
        *,
        checked: bool,
        send: Callable[[str, m.Message], None],
        send_letter: Callable[[str, m.Message], None],
        lease_timeout_s: float,
        watermark_interval_s: float,
        clock: Clock,
    ) -> None:
        """`checked`: segments carry checksums. `send` is the control channel's."""
        self._checked = checked
        self.buffer = StagingBuffer(size_bytes, device)
        self.allocator = StagingAllocator(size_bytes)
        self._rank, self._tickets = rank, tickets
        self._send, self._send_letter, self._clock = send, send_letter, clock
        self._lease_timeout_s, self._watermark_interval_s = lease_timeout_s, watermark_interval_s
        self._untold: deque[Item] = deque()
        """Could not be written when they were leased, and whose senders have not heard that they can be now."""
        self._ended_waits_s = 0.0
        self._head_lease, self._head_since_s = -1, 0.0
        self.due_s = 0.0
        """When `look` has something to do."""
        self.watermarks = self.repeats = self.expired = self.stale = 0

    # --- leases

    def on_lease_request(self, peer: str, request: m.LeaseRequest) -> None:
        """Grants ring space. Repeated: the same leases are named again."""
        incoming = self._tickets.open.get(request.ticket)
        if incoming is not None and request.src_rank in incoming.ended:
            self.stale += 1  # overtaken by the `SenderEnded` that makes it void
            return
        if incoming is None or incoming.key != request.key or incoming.closing or incoming.failed:
            self.stale += 1
            why = "the decode side has ended this request"
            self._send(peer, m.StopSending(request.key, request.ticket, why))
            return
        try:
            if incoming.peers.get(request.src_rank) != peer:
                raise ProtocolError(f"{peer} is not prefill rank {request.src_rank} of {incoming.key}")
            items = [self._lease(incoming, peer, request.src_rank, segment) for segment in request.segments]
        except (ProtocolError, ValueError) as exc:
            self._tickets.fail(incoming, ProtocolError(f"refused a lease request of {peer}: {exc}"))
            return
        starts = [(item.segment.index, item.lease.start) for item in items]
        ring = self.allocator
        grant = m.LeaseGrant(request.key, request.ticket, self._rank, starts, ring.size_bytes, ring.watermark)
        self._send_letter(peer, grant)
        for item in items:
            if item.waits_since_s is None and not ring.writable(item.lease):
                item.waits_since_s = self._clock()
                self._untold.append(item)

    def _lease(self, incoming: Incoming, peer: str, src_rank: int, segment: Segment) -> Item:
        known = incoming.items.get((src_rank, segment.index))
        if known is not None:
            if known.segment != segment:
                raise ProtocolError(f"segment {segment.index} was another one before")
            return known
        if segment.src_rank != src_rank or segment.dst_rank != self._rank:
            raise ProtocolError(f"{segment} does not go from rank {src_rank} to rank {self._rank}")
        incoming.coverage.add(segment)
        nbytes = message_bytes(segment.nbytes, self._checked)
        lease = self.allocator.assign(nbytes, owner=incoming.ticket.number)
        item = Item(incoming, segment, peer, lease)
        incoming.items[(src_rank, segment.index)] = item
        return item

    def view(self, item: Item) -> torch.Tensor:
        """The segment's region, uint8 `[lease.nbytes]`: the segment and, if checked, its checksum."""
        return self.buffer.view(self.allocator.offset(item.lease), item.lease.nbytes)

    def wait_again(self, item: Item) -> None:
        """The segment comes once more, into the same lease: a lease that was writable stays so until it is freed."""
        item.state, item.again = State.LEASED, True
        if item.lease.id == self._head_lease:
            self._head_since_s = self._clock()  # its sender was not slow

    def free(self, item: Item) -> None:
        """Nothing writes or reads the region any more: whom that lets in is told."""
        self.allocator.free(item.lease.id)
        if self._untold:
            self.tell_writable()

    def drop(self, item: Item) -> None:
        """The segment does not land: frees its lease, and ends what was only waiting for that."""
        item.state = State.DROPPED
        self.free(item)
        self._tickets.maybe_closed(item.incoming)

    # --- watermarks and deadlines

    def tell_writable(self) -> None:
        """Sends the watermark to those whose segments it newly lets in: at most one message for each segment."""
        peers: set[str] = set()
        while self._untold and (
            self._untold[0].state is not State.LEASED or self.allocator.writable(self._untold[0].lease)
        ):
            item = self._untold.popleft()
            self._ended_waits_s += self._clock() - (item.waits_since_s or 0.0)
            if item.state is State.LEASED:
                peers.add(item.peer)
        for peer in peers:
            self.watermarks += 1
            self._send_letter(peer, self._watermark())

    def look(self, now_s: float) -> None:
        """Sends watermarks again, for one may have been lost; ends a request that others wait behind for too long."""
        self.due_s = now_s + self._watermark_interval_s
        waiting = (item for incoming in self._tickets.open.values() for item in incoming.held())
        for peer in {i.peer for i in waiting if i.state is State.LEASED and self.allocator.writable(i.lease)}:
            self.repeats += 1
            self._send_letter(peer, self._watermark())
        self._expire(now_s)

    def _watermark(self) -> m.Watermark:
        return m.Watermark(self._rank, self.allocator.watermark, self.allocator.size_bytes)

    def _expire(self, now_s: float) -> None:
        """Ends the request at the head of the ring when its sender is too slow: others wait behind it."""
        oldest = self.allocator.oldest()
        if oldest is None or oldest.id != self._head_lease:
            self._head_lease, self._head_since_s = (oldest.id if oldest else -1), now_s
            return
        item = next((i for k in self._tickets.open.values() for i in k.held() if i.lease is oldest), None)
        late = now_s - self._head_since_s > self._lease_timeout_s
        if item is not None and item.state is State.LEASED and late and not item.incoming.failed:
            self.expired += 1
            limit = f"{self._lease_timeout_s:g} s (transfer.lease_timeout_s)"
            self._tickets.fail(item.incoming, TransportError(f"{item.segment} did not come within {limit}"))

    # --- looking in

    def waits_s(self, now_s: float) -> float:
        """How long leases have waited until they could be written, in all."""
        return self._ended_waits_s + sum(now_s - (item.waits_since_s or 0.0) for item in self._untold)

    def check(self, probe: Lease | None) -> None:
        """Raises `InvariantError` unless the leases are those of segments on their way and of a probe."""
        self.allocator.check()
        held = {item.lease.id for incoming in self._tickets.open.values() for item in incoming.held()}
        held |= {probe.id} if probe is not None else set()
        leased = {lease.id for lease in self.allocator.outstanding()}
        if held != leased:
            raise InvariantError(f"segments hold leases {sorted(held)}, the ring has {sorted(leased)}")
