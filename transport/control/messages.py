"""All messages of the control plane, and their encoding: typed msgpack, never pickle.

A new message is one more `Message` subclass in this file. The class name is its tag on the wire. Fields that
a peer could abuse carry bounds, which decoding checks.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal, Union

import msgspec

from disagg.core.bounds import Count, Label, Seconds
from disagg.core.config.read import Role
from disagg.core.errors import ProtocolError
from disagg.core.prefixes import Digest
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.tokens import TokenIds, unpack_tokens
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Segment, Ticket, TokenLogprobs
from transport.handles import MemoryHandle
from transport.tags import INBOX_NUMBERS, SEGMENT_BITS, TICKET_NUMBERS, WRITER_BITS

MAX_MESSAGE_BYTES = 16 << 20
"""Largest encoded message; a prompt of four million tokens fits."""

TicketNumber = Annotated[int, msgspec.Meta(ge=0, lt=TICKET_NUMBERS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << WRITER_BITS)]
SegmentIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << SEGMENT_BITS)]
ProbeNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << (WRITER_BITS + SEGMENT_BITS))]
InboxNumber = Annotated[int, msgspec.Meta(ge=0, lt=INBOX_NUMBERS)]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base class of all messages."""


# --- request life cycle: router <-> leaders -----------------------------------------------------------------


class Reserve(Message, frozen=True):
    """Router -> decode leader: reserve a row and all pages for this prompt."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    deadline_s: Seconds
    """Time left for the whole request; relative, because host clocks differ."""
    prefill_group: str
    cache_salt: str = ""
    """Only prompts with the same salt share cached KV."""
    answered: list[Count] = []
    """Tokens of the answer so far, from a group that was lost; the request then has one sequence. Their KV is
    transferred behind the prompt's."""
    after: RequestKey | None = None
    """The attempt that this one replaces, in the same group: row, pages and KV that has landed pass over."""
    wait_s: Seconds = 0.0
    """How long the request may wait for row and pages; `Failed` (busy) then."""


class Reserved(Message, frozen=True):
    """Decode leader -> router: the row and the pages are reserved."""

    key: RequestKey
    ticket: Ticket


class Failed(Message, frozen=True):
    """Any node -> router: the request failed on this node. `code` is that of `disagg.core.errors`."""

    key: RequestKey
    code: str
    message: str
    retryable: bool
    retry_after_s: Seconds = 0.0
    resumable: bool = False
    """The decode group keeps row and pages until another attempt continues there (`Reserve.after`), or `Release`."""


class Prefill(Message, frozen=True):
    """Router -> prefill leader: compute the prompt and send the missing segments of the ticket."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    ticket: Ticket
    deadline_s: Seconds
    cache_salt: str = ""
    """Only prompts with the same salt share cached KV."""
    answered: list[Count] = []
    """Tokens of the answer so far; see `Reserve`. They are computed like the prompt."""


class Prefilled(Message, frozen=True):
    """Prefill leader -> router: the prompt is computed; its last segments may still be in flight."""

    key: RequestKey
    first_tokens: list[Count]
    """The next token of each answer, behind `Prefill.answered`; empty where not yet chosen, as in beam search."""
    logprobs: list[TokenLogprobs] = []
    """One entry for each first token if the request has `logprobs`, else empty."""


class Transferred(Message, frozen=True):
    """Prefill leader -> router: every segment has been sent. Counts cover this request on all ranks.

    `messages` counts control messages sent by prefill ranks to decode ranks for this request.
    """

    key: RequestKey
    nbytes: Count
    segments: Count
    messages: Count
    seconds: Seconds
    """Time during which at least one segment was gathered or sent, on the rank where it was longest."""


class FirstTokens(Message, frozen=True):
    """Prefill leader -> decode leader: the tokens chosen at the prompt's last position.

    `tokens` has the first token of each answer; for beam search, the likeliest tokens in descending order, with their
    log-probabilities in `scores`.
    """

    key: RequestKey
    ticket: TicketNumber
    tokens: Annotated[list[Count], msgspec.Meta(min_length=1)]
    scores: list[float] = []


class Tokens(Message, frozen=True):
    """Decode leader -> router: the tokens of an answer from `index` on.

    `finish` is the finish reason; None while the answer continues.
    """

    key: RequestKey
    index: Count
    tokens: list[int]
    finish: str | None = None
    logprobs: list[TokenLogprobs] = []
    """One entry for each of `tokens` if the request has `logprobs`, else empty."""
    answer: Count = 0
    """Index of the answer within the request."""


class StepTokens(Message, frozen=True):
    """Decode leader -> router: the tokens that one step gave the requests of the router."""

    tokens: list[Tokens]


class EndAnswer(Message, frozen=True):
    """Router -> decode leader: end one answer; the request's other answers continue. Idempotent."""

    key: RequestKey
    answer: Count


class Release(Message, frozen=True):
    """Router -> both leaders: the request has ended; free all its resources. Idempotent."""

    key: RequestKey
    reason: str


class Released(Message, frozen=True):
    """Leader -> router: all resources of the request are freed here."""

    key: RequestKey


# --- status of groups: router <-> leaders, leader <- its ranks
# --------------------------------------------------


class Watch(Message, frozen=True):
    """Router -> leader: send group reports; the router renews this within `interval_s`. 0 stops the reports."""

    interval_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    prefixes: Literal["none", "events", "all"] = "none"
    """Whether to send cache digests too; `all` requests a full digest because the router missed some."""


class CacheDigest(Message, frozen=True):
    """Leader -> router that watches prefixes: entries added to and removed from the cache since the last
    digest."""

    group: Label
    digest: Digest
    switch_tokens: Count = 0
    """See `disagg.core.prefixes.PrefixKey.of`."""


class GroupReport(Message, frozen=True):
    """Leader -> router that watches the group: the group's current status."""

    status: GroupStatus


class RankReport(Message, frozen=True):
    """Rank -> its leader: the rank's current status."""

    status: RankStatus


# --- the directory of a cluster's groups: routers, operators <-> directory
# -----------------------------------


class Join(Message, frozen=True):
    """Router -> directory: subscribe to the list of groups and its changes."""


class Groups(Message, frozen=True):
    """Directory -> router: all current groups. A group that is missing since the last version has died."""

    version: Count
    """Grows with every change."""
    groups: list[GroupInfo]
    draining: list[str]
    """Names of groups that must receive no new requests."""


class Using(Message, frozen=True):
    """Router -> directory: after `version`, this router has or starts requests with these groups only."""

    version: Count
    names: list[str]


class Scale(Message, frozen=True):
    """Operator -> directory: run `count` groups of `role`. `Scaled` replies once they are running."""

    role: Role
    count: Annotated[int, msgspec.Meta(ge=1)]


class Scaled(Message, frozen=True):
    """Directory -> operator: scaling is done, or the reason of its failure. Replies keep the order of the
    requests."""

    error: str = ""


# --- inside one group ---------------------------------------------------------------------------------------


class Plan(Message, frozen=True):
    """Leader -> its ranks: the work of step `step`; `body` has the engine's own encoding."""

    step: Count
    body: bytes


class OpenSend(Message, frozen=True):
    """Prefill leader -> its ranks: a request starts; its KV is in `pages` and goes to the ticket's group."""

    key: RequestKey
    ticket: Ticket
    pages: list[Count]


class RankSent(Message, frozen=True):
    """Prefill rank -> its leader: this rank has sent all segments of the ticket; its pages may be freed."""

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
    """Decode leader -> its ranks: a ticket is open; its KV comes from `prefill_group` and goes into `pages`."""

    ticket: Ticket
    pages: list[Count]
    prefill_group: str


class RankOpened(Message, frozen=True):
    """Decode rank -> its leader: the rank accepts segments of the ticket."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class CloseTransfer(Message, frozen=True):
    """Leader -> its ranks: stop moving this ticket's KV. `RankClosed` replies. Idempotent."""

    key: RequestKey
    ticket: TicketNumber
    reason: str


class RankClosed(Message, frozen=True):
    """Rank -> its leader: the rank no longer accesses memory of the ticket; its pages may be reused."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    landed_tokens: Count = 0
    """On a decode rank: the first tokens of the ticket whose KV has landed whole."""


class Landed(Message, frozen=True):
    """Decode rank -> its leader: all segments of the ticket for this rank are in its pages."""

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


# --- transfer: prefill rank <-> decode rank -----------------------------------------------------------------
# The first eight are active messages (`transport.active_messages`); the others use the control channel.


class LeaseRequest(Message, frozen=True):
    """Prefill rank -> decode rank: requests ring space for these segments."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    segments: list[Segment]


class LeaseGrant(Message, frozen=True):
    """Decode rank -> prefill rank: `(segment index, ring position)` pairs, and the ring's current watermark."""

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    starts: list[tuple[SegmentIndex, Count]]
    ring_bytes: Count
    watermark: Count


class Watermark(Message, frozen=True):
    """Decode rank -> prefill ranks: the ring's watermark. It only grows."""

    dst_rank: Rank
    watermark: Count
    ring_bytes: Count


class SendAgain(Message, frozen=True):
    """Decode rank -> prefill rank: resend a segment whose checksum does not match.

    The resend uses the same lease or the same direct write. Idempotent.
    """

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    segment: SegmentIndex


class TransferVerified(Message, frozen=True):
    """Decode rank -> each of its prefill ranks: all segments of the tickets are in their pages, with valid
    checksums."""

    tickets: Annotated[list[tuple[RequestKey, TicketNumber]], msgspec.Meta(min_length=1)]
    dst_rank: Rank


class ProbeRequest(Message, frozen=True):
    """Prefill rank -> decode rank: requests a wire probe with messages of at most `nbytes`. Idempotent."""

    number: ProbeNumber
    """Random number of the probe; part of its messages' tag."""
    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class ProbeAnswer(Message, frozen=True):
    """Decode rank -> prefill rank: the probe may start, towards a rank on `host` and `device`; or a refusal."""

    number: ProbeNumber
    host: Label
    device: Label
    refused: str = ""
    """Empty: ring space is reserved. Else a temporary reason to refuse; the sender may ask again."""


class ProbeEnded(Message, frozen=True):
    """Prefill rank -> decode rank: the probe has ended; its ring space may be freed."""

    number: ProbeNumber


class PoolOffer(Message, frozen=True):
    """Decode rank -> prefill rank: offers the KV pool and the fence words for direct writes."""

    dst_rank: Rank
    pools: tuple[MemoryHandle, ...]
    """The pool of each class of layers."""
    fences: MemoryHandle


class PoolRefused(Message, frozen=True):
    """Prefill rank -> decode rank: the pool cannot be opened; tickets opened from now on do not use direct
    writes."""

    src_rank: Rank
    reason: str


class LinkBroken(Message, frozen=True):
    """Rank -> peer rank: the data connection between them is broken; the sender has fenced the receiver."""

    answer: bool = False
    """True for a reply; a message that is not a reply is answered by one."""


class Linked(Message, frozen=True):
    """Rank -> peer rank: the sender has linked the receiver, and takes its active messages under this number."""

    inbox: InboxNumber


class SenderEnded(Message, frozen=True):
    """Prefill rank -> decode rank: the segments `sent` were sent, and no more follow for this ticket."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    sent: list[SegmentIndex]
    reason: str
    again: list[SegmentIndex] = []
    """Segments among `sent` that were sent a second time."""


class StopSending(Message, frozen=True):
    """Decode rank -> prefill rank: stop sending for this ticket. `SenderEnded` replies."""

    key: RequestKey
    ticket: TicketNumber
    reason: str


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """Returns the encoded message. Raises `ProtocolError` when it exceeds `max_bytes`."""
    body = _ENCODER.encode(message)
    if len(body) > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes; a message may take {max_bytes} bytes "
            f"(control.max_message_bytes, {MAX_MESSAGE_BYTES} at most)"
        )
    return body


def decode(body: bytes) -> Message:
    """Returns the decoded message. Raises `ProtocolError` for any invalid bytes."""
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"message of {len(body)} bytes cannot be decoded: {exc}") from exc


def _packed(value: object) -> bytes:
    """Encodes token ids as their memory, without conversion."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"no message has a field of type {type(value).__name__}")


def _unpacked(kind: type, value: Any) -> TokenIds:
    if not isinstance(value, bytes):
        raise ValueError(f"token ids are bytes, not {type(value).__name__}")
    return unpack_tokens(value)


MESSAGE_TYPES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)
# A run-time union: the classes above are the only list of messages.
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Union[MESSAGE_TYPES],  # noqa: UP007
    dec_hook=_unpacked,
)
