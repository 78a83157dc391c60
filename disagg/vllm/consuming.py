"""Transfers into one worker: tickets with reserved blocks, from their metadata until all KV is in the blocks.

`Consuming` runs on the transfer thread. A transfer that fails, is cancelled or ends with its lease is reported when
no rank can write to its blocks any more.
"""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass
from functools import partial

import structlog

from disagg.core.errors import DisaggError, InvariantError
from disagg.core.ports import Clock
from disagg.core.types import GroupInfo, Ticket
from disagg.data_path.consumer import KVConsumer
from disagg.data_path.events import TransferEvent, TransferEventKind
from disagg.vllm.groups import NULL_BLOCK
from disagg.vllm.producing import pushed_to
from disagg.vllm.received import ReceivedRequests
from disagg.vllm.states import check_exchange
from disagg.vllm.work import ReceiveWork, ReleaseWork
from transport.control import messages as m

log = structlog.get_logger(__name__)

_MOST_REFUSED = 64
"""Largest number of groups whose refusal is remembered; engines that start again have new names."""


class IncomingState(enum.Enum):
    """State of a transfer into this worker."""

    UNLINKED = "unlinked"
    """The link with the producer's group is missing."""
    OPEN = "open"
    ENDING = "ending"
    """Failed or cancelled: a rank may still write to the blocks."""
    LANDED = "landed"
    """Reported. The data path closes the ticket."""


@dataclass(slots=True, eq=False)
class ReservedBlocks:
    """Blocks of one request that KV of another engine is written to."""

    work: ReceiveWork
    until_s: float
    """End of the lease."""
    state: IncomingState = IncomingState.UNLINKED
    failed: bool = False
    """Whether the blocks are reported as not loaded."""

    @property
    def ticket(self) -> Ticket:
        """The ticket that this engine's scheduler made."""
        return self.work.ticket


@dataclass(frozen=True, slots=True)
class ConsumingStatistics:
    """Counts of one worker's incoming transfers."""

    open: int
    landed: int
    failed: int
    cancelled: int
    releases: int
    """Releases that wait for a link."""


class Consuming:
    """Incoming transfers of one worker, the engine of its `KVConsumer`."""

    def __init__(self, rank: int, lease_s: float, link_s: float, clock: Clock, early_s: float = 0.0) -> None:
        """`link_s`: time limit for the link with a producer's group, while a ticket waits for it. `early_s`: as in
        `ReceivedRequests`."""
        self._rank, self._lease_s, self._link_s, self._clock = rank, lease_s, link_s, clock
        self._predicts = early_s > 0
        self.endpoint: KVConsumer
        """Set before the endpoint starts."""
        self._open: dict[int, ReservedBlocks] = {}
        """By the ticket's number."""
        self._releases: list[tuple[float, ReleaseWork]] = []
        self._refused: dict[str, str] = {}
        """Why groups of other engines could not be linked, the latest `_MOST_REFUSED` of them."""
        self._landed = self._failed = self._cancelled = 0
        self.received = ReceivedRequests(clock, early_s)
        """Requests whose blocks nobody writes any more, or only for a short time."""
        self.failed: deque[ReceiveWork] = deque()
        """Requests without their KV that were not reported early; each one comes here before it comes in `received`.
        Any thread may pop."""

    # --- work of the engine's scheduler

    def receive(self, work: ReceiveWork) -> None:
        """Opens a ticket, now or when its group is linked."""
        reserved = ReservedBlocks(work, self._clock() + min(self._link_s, self._lease_s))
        self._open[work.ticket.number] = reserved
        if NULL_BLOCK in work.states.blocks:
            self._fail(reserved, "vLLM has reserved no block for a recurrent state")
        elif work.group in self._refused:  # the engines do not meet again soon
            self._fail(reserved, self._refused[work.group])
        else:
            self._open_if_linked(reserved)

    def cancel(self, request_id: str) -> None:
        """Ends the transfer of an aborted request. A request that was reported before is not reported again."""
        for reserved in list(self._open.values()):
            if reserved.work.request_id == request_id and reserved.state is not IncomingState.LANDED:
                self._cancelled += not reserved.failed
                self._end(reserved, "the consumer has aborted the request")

    def give_up(self, request_id: str, reason: str) -> None:
        """Ends the transfer of a request that was reported early, for which a step has waited too long."""
        for reserved in list(self._open.values()):
            if reserved.work.request_id == request_id:
                self._fail(reserved, reason)

    def release(self, work: ReleaseWork) -> None:
        """Tells the producer's ranks that no KV is needed, now or when their group is linked."""
        self._releases.append((self._clock() + self._lease_s, work))
        self._send_releases()

    # --- messages and events

    def on_message(self, peer: str, message: m.Message) -> None:
        """Handles a control message; see `disagg.data_path.endpoint.Engine`."""
        match message:
            case m.EngineGroups(groups=[own, other]):
                self._link(own, other)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _link(self, own: GroupInfo, other: GroupInfo) -> None:
        try:
            check_exchange(own, other)
            self.endpoint.link(own, other)
            self._refused.pop(other.name, None)
        except DisaggError as exc:
            log.error("not_linked", group=other.name, error=str(exc))
            self._refused[other.name] = str(exc)
            if len(self._refused) > _MOST_REFUSED:
                del self._refused[next(iter(self._refused))]
            for reserved in [one for one in self._open.values() if one.work.group == other.name]:
                self._fail(reserved, str(exc))

    def on_linked(self, group: GroupInfo) -> None:
        """Opens the tickets that waited for the link."""
        for reserved in list(self._open.values()):
            self._open_if_linked(reserved)
        self._send_releases()

    def on_event(self, event: TransferEvent) -> None:
        """Handles an event of a transfer."""
        reserved = self._open.get(event.ticket)
        if reserved is None or reserved.ticket.key != event.key:
            return
        match event.kind:
            case TransferEventKind.OPENED if reserved.state is IncomingState.OPEN:
                push = m.PushRequest(
                    reserved.ticket, self._rank, reserved.work.held, reserved.work.states.tokens
                )
                self._send(reserved.work.group, push)
            case TransferEventKind.LANDED if reserved.state is IncomingState.OPEN:
                reserved.state = IncomingState.LANDED
                self.received.add(reserved.work.request_id, loaded=True)
                self._landed += 1
                self.endpoint.close(event.key, event.ticket, "landed")
            case TransferEventKind.FAILED:
                self._fail(reserved, event.reason)
            case TransferEventKind.CLOSED:
                self._ended(reserved)

    def on_tick(self, now_s: float) -> None:
        """Ends the leases that are over."""
        for reserved in [one for one in self._open.values() if one.until_s <= now_s]:
            if reserved.state is IncomingState.UNLINKED:
                limit = f"{self._link_s:g} s (control.peer_timeout_s)"
                self._fail(reserved, f"no link with {reserved.work.group} within {limit}")
            else:
                self._fail(reserved, f"the KV did not come within {self._lease_s:g} s (lease_s)")
        self._releases = [one for one in self._releases if one[0] > now_s]

    # --- states

    def _open_if_linked(self, reserved: ReservedBlocks) -> None:
        linked = self.endpoint.link_with(reserved.work.group) is not None
        if linked and reserved.state is IncomingState.UNLINKED:
            reserved.state, reserved.until_s = IncomingState.OPEN, self._clock() + self._lease_s
            ticket, work = reserved.ticket, reserved.work
            # The last token alone is computed again by vLLM, which then does not look whether its block is lost.
            predicts = self._predicts and len(ticket.tokens) > 1
            expected = partial(self.received.expect, work.request_id) if predicts else None
            self.endpoint.open(ticket, work.tables, work.group, work.states.blocks, expected)

    def _fail(self, reserved: ReservedBlocks, reason: str) -> None:
        if reserved.state in (IncomingState.UNLINKED, IncomingState.OPEN):
            log.warning("kv_not_received", request=reserved.work.request_id, error=reason)
            self._failed += 1
            reserved.failed = True
            self._end(reserved, reason)
            self.received.lose(reserved.work.request_id, reserved.work.tables[0])

    def _end(self, reserved: ReservedBlocks, reason: str) -> None:
        self.received.withdraw(reserved.work.request_id)
        if reserved.state is IncomingState.UNLINKED:
            self.release(ReleaseWork(reserved.ticket.key.request_id, reserved.work.group))
            self._ended(reserved)
        elif reserved.state is IncomingState.OPEN:
            reserved.state = IncomingState.ENDING
            self._send(reserved.work.group, m.PushCancelled(reserved.ticket.key.request_id, reason))
            self.endpoint.close(reserved.ticket.key, reserved.ticket.number, reason)

    def _ended(self, reserved: ReservedBlocks) -> None:
        del self._open[reserved.ticket.number]
        if reserved.state is not IncomingState.LANDED:
            if reserved.failed and not self.received.lose(reserved.work.request_id, reserved.work.tables[0]):
                self.failed.append(reserved.work)
            self.received.add(reserved.work.request_id, loaded=False)

    def _send_releases(self) -> None:
        waiting = []
        for until_s, work in self._releases:
            if self.endpoint.link_with(work.group) is None:
                waiting.append((until_s, work))
            else:
                self._send(
                    work.group, m.PushCancelled(work.key, "the consumer has all KV, or aborted the request")
                )
        self._releases = waiting

    def _send(self, group: str, message: m.Message) -> None:
        link = self.endpoint.link_with(group)
        for peer in pushed_to(link, self._rank) if link is not None else ():
            self.endpoint.wires.control.send(peer.control_address, message)

    # --- inspection

    def statistics(self) -> ConsumingStatistics:
        """Returns the counts at this moment."""
        counts = (self._landed, self._failed, self._cancelled, len(self._releases))
        return ConsumingStatistics(len(self._open), *counts)

    def check(self) -> None:
        """Raises `InvariantError` unless each ticket is stored under its number."""
        for number, reserved in self._open.items():
            if reserved.ticket.number != number:
                raise InvariantError(f"ticket {reserved.ticket.number} is stored under {number}")
