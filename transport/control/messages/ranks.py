"""Messages inside one group: between its leader and its ranks."""

from __future__ import annotations

from disagg.core.bounds import Count, Seconds
from disagg.core.types import RequestKey, Ticket
from transport.control.messages.base import Message, Rank, TicketNumber


class Plan(Message, frozen=True):
    """Leader -> its ranks: the work of step `step`. `body` is an encoded `disagg.node.plan.StepPlan`."""

    step: Count
    body: bytes


class OpenSend(Message, frozen=True):
    """Prefill leader -> its ranks: send a request's KV, which is in `pages`, to the ticket's decode group."""

    key: RequestKey
    ticket: Ticket
    pages: list[Count]
    reservation: Count = 0
    """Reservation of `pages`; see `disagg.node.plan.Work`."""
    begun: bool = False
    """Whether steps planned before this message compute KV in `pages`; this KV is sent too."""
    row: Count = 0
    """Row of the request, which is also the slot of its recurrent state."""
    more: tuple[tuple[Count, ...], ...] = ()
    """Pages of the page tables after the first, on ranks with several (`disagg.kv.page_tables`)."""
    states: tuple[Count, ...] = ()
    """Slots of the recurrent state, on ranks with several (`PageTables.of_states`); empty: `row`."""


class RankSent(Message, frozen=True):
    """Prefill rank -> its leader: this rank has sent all segments of the ticket; the rank's pages may be freed."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    nbytes: Count
    segments: Count
    messages: Count
    seconds: Seconds


class RankStopped(Message, frozen=True):
    """Prefill rank -> its leader: the decode side needs no more KV of the ticket."""

    key: RequestKey
    ticket: TicketNumber


class OpenReceive(Message, frozen=True):
    """Decode leader -> its ranks: accept a ticket's KV from `prefill_group`, and write the KV into `pages`."""

    ticket: Ticket
    pages: list[Count]
    prefill_group: str
    more: tuple[tuple[Count, ...], ...] = ()
    """Pages of the page tables after the first, on ranks with several (`disagg.kv.page_tables`)."""
    states: tuple[Count, ...] = ()
    """Slots of the recurrent state, on ranks with several (`PageTables.of_states`); empty: `ticket.row`."""
    is_head: bool = False
    """Whether the group computes the rest of the prompt itself, so that the rank reports `Arriving`."""


class RankOpened(Message, frozen=True):
    """Decode rank -> its leader: the rank accepts segments of the ticket."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class CloseTransfer(Message, frozen=True):
    """Leader -> its ranks: stop moving this ticket's KV. Each rank replies with `RankClosed`. Idempotent."""

    key: RequestKey
    ticket: TicketNumber
    reason: str


class RankClosed(Message, frozen=True):
    """Rank -> its leader: the rank no longer accesses memory of the ticket; the ticket's pages may be reused."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    landed_tokens: Count = 0
    """From a decode rank: number of leading tokens of the ticket whose KV has landed completely."""


class Arriving(Message, frozen=True):
    """Decode rank -> its leader: the first layer of all the ticket's tokens is in the rank's pages.

    Sent only for a ticket with `OpenReceive.is_head`. The group may then begin to compute the rest of the prompt,
    layer by layer behind the KV that still arrives.
    """

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class LandsSoon(Message, frozen=True):
    """Decode rank -> its leader: the last segment of the ticket for this rank is expected within a few steps.

    Sent by rank 0, at most once for each ticket, and not if the end could not be predicted. The leader may then
    launch the next step later.
    """

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class Landed(Message, frozen=True):
    """Decode rank -> its leader: all segments of the ticket for this rank are in the rank's pages."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class Swapped(Message, frozen=True):
    """Decode rank -> its leader: a page copy ordered by a plan is done, or failed with `error`."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    seconds: Seconds
    error: str = ""


class CacheMoved(Message, frozen=True):
    """Rank -> its leader: a copy between tiers of the prefix cache is done, or failed with `error`."""

    operation: Count
    rank: Rank
    error: str = ""
    seconds: Seconds = 0.0
    """For a load: duration of its copies on the rank's device."""


class StorageMoved(Message, frozen=True):
    """Rank -> its leader: progress of an operation with the third tier of the prefix cache."""

    operation: Count
    rank: Rank
    items: Count
    """Number of leading items that the rank has found, fetched or stored so far: pages, then recurrent states."""
    done: bool
    """Whether the rank has finished the operation."""
    error: str = ""
    """Error after which the operation's blocks cannot be used; only with `done`."""
    seconds: Seconds = 0.0
    """For a fetch: time that the rank has spent on its reads so far."""
    states: tuple[Count, ...] = ()
    """For a find: see `disagg.kv.cache_operations.StorageReport.states`."""


class RankFailed(Message, frozen=True):
    """Rank -> its leader: the request failed on this rank."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    code: str
    message: str


class RankBroken(Message, frozen=True):
    """Rank -> its leader: a step failed on this rank; the group cannot compute any more."""

    rank: Rank
    reason: str
