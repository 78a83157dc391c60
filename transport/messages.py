"""Every message of the control plane, and how it becomes bytes: msgpack, typed, never pickle.

To add a message, write one more `Message` subclass here; nothing else changes. A class's name is its tag on
the wire. Fields that a peer could abuse carry bounds, checked when decoding.
"""

from __future__ import annotations

from array import array
from typing import Annotated, Any, Literal, Union

import msgspec

from disagg.core.bounds import Count, Label, Seconds
from disagg.core.config import Role
from disagg.core.errors import ProtocolError
from disagg.core.prefixes import Digest
from disagg.core.status import GroupStatus, RankStatus
from disagg.core.tokens import TokenIds, unpack_tokens
from disagg.core.types import GroupInfo, RequestKey, SamplingParams, Segment, Ticket, TokenLogprobs
from transport.handles import MemoryHandle
from transport.tags import SEGMENT_BITS, TICKET_NUMBERS, WRITER_BITS

MAX_MESSAGE_BYTES = 16 << 20
"""Largest encoded message: a prompt of four million tokens fits."""

TicketNumber = Annotated[int, msgspec.Meta(ge=0, lt=TICKET_NUMBERS)]
Rank = Annotated[int, msgspec.Meta(ge=0, lt=1 << WRITER_BITS)]
SegmentIndex = Annotated[int, msgspec.Meta(ge=0, lt=1 << SEGMENT_BITS)]
ProbeNumber = Annotated[int, msgspec.Meta(ge=0, lt=1 << (WRITER_BITS + SEGMENT_BITS))]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Root of all messages."""


# --- request life cycle: router <-> leaders -----------------------------------------------------------------


class Reserve(Message, frozen=True):
    """Router -> decode leader: set a row and all pages of this prompt aside."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    deadline_s: Seconds
    """Time left for the whole request, relative: clocks of two hosts differ."""
    prefill_group: str
    cache_salt: str = ""
    """Only prompts of the same salt share cached KV."""


class Reserved(Message, frozen=True):
    """Decode leader -> router: set aside."""

    key: RequestKey
    ticket: Ticket


class Failed(Message, frozen=True):
    """Any node -> router: this request ended here without its answer. `code` as in `disagg.core.errors`."""

    key: RequestKey
    code: str
    message: str
    retryable: bool
    retry_after_s: Seconds = 0.0


class Prefill(Message, frozen=True):
    """Router -> prefill leader: compute the prompt and send what the ticket lacks."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    ticket: Ticket
    deadline_s: Seconds
    cache_salt: str = ""
    """Only prompts of the same salt share cached KV."""


class Prefilled(Message, frozen=True):
    """Prefill leader -> router: the prompt is computed; its last segments may still be on their way."""

    key: RequestKey
    first_tokens: list[Count]
    """The first one of each answer; none where they are not settled yet, as in beam search."""
    logprobs: list[TokenLogprobs] = []
    """One for each of them when the request asked for them, else none."""


class Transferred(Message, frozen=True):
    """Prefill leader -> router: every segment has left. Counts are of this request, over all ranks.

    `messages` counts control messages sent by prefill ranks to decode ranks for this request.
    """

    key: RequestKey
    nbytes: Count
    segments: Count
    messages: Count
    seconds: Seconds
    """How long at least one segment was being gathered or sent; of the rank where it was longest."""


class FirstTokens(Message, frozen=True):
    """Prefill leader -> decode leader: what was chosen at the prompt's last position.

    The first token of each answer; of a beam search the likeliest tokens, the likeliest first, with their
    log-probabilities.
    """

    key: RequestKey
    ticket: TicketNumber
    tokens: Annotated[list[Count], msgspec.Meta(min_length=1)]
    scores: list[float] = []


class Tokens(Message, frozen=True):
    """Decode leader -> router: tokens `index ...` of an answer; `finish` names why it ended, None while it
    runs.
    """

    key: RequestKey
    index: Count
    tokens: list[int]
    finish: str | None = None
    logprobs: list[TokenLogprobs] = []
    """One for each of `tokens` when the request asked for them, else none."""
    answer: Count = 0
    """Which of the request's answers."""


class EndAnswer(Message, frozen=True):
    """Router -> decode leader: no more of one answer is wanted; the request's others go on. Safe to repeat."""

    key: RequestKey
    answer: Count


class Release(Message, frozen=True):
    """Router -> both leaders: the request is over; free whatever it holds. Safe to repeat."""

    key: RequestKey
    reason: str


class Released(Message, frozen=True):
    """Leader -> router: nothing of the request is left here."""

    key: RequestKey


# --- what groups tell of themselves: router <-> leaders, leader <- its ranks ----------------------------------


class Watch(Message, frozen=True):
    """Router -> leader: tell me how the group is; I ask again within `interval_s`. 0: tell me no more."""

    interval_s: Annotated[float, msgspec.Meta(ge=0, le=3600)]
    prefixes: Literal["none", "news", "all"] = "none"
    """Whether to be told of cached prefixes too; `all`: some of that is missing, so all of it again."""


class CacheDigest(Message, frozen=True):
    """Leader -> router that watches prefixes: what came into this group's cache and went since it was told last."""

    group: Label
    digest: Digest
    switch_tokens: Count = 0
    """See `disagg.core.prefixes.PrefixKey.of`."""


class GroupReport(Message, frozen=True):
    """Leader -> router that watches: the group as it stands."""

    status: GroupStatus


class RankReport(Message, frozen=True):
    """Rank -> its leader: the rank as it stands."""

    status: RankStatus


# --- the directory of a cluster's groups: routers, operators <-> directory -----------------------------------


class Join(Message, frozen=True):
    """Router -> directory: tell me of the groups, now and whenever they change."""


class Groups(Message, frozen=True):
    """Directory -> router: all groups there are. One that was told before and is missing now has died."""

    version: Count
    """Grows with every change."""
    groups: list[GroupInfo]
    draining: list[str]
    """Names of those that must be given nothing new."""


class Using(Message, frozen=True):
    """Router -> directory: having heard `version`, I have or may start requests with these groups only."""

    version: Count
    names: list[str]


class Scale(Message, frozen=True):
    """Operator -> directory: have `count` groups of `role`; answered, when they are there, by `Scaled`."""

    role: Role
    count: Annotated[int, msgspec.Meta(ge=1)]


class Scaled(Message, frozen=True):
    """Directory -> operator: done, or why not. Answers come in the order of asking."""

    error: str = ""


# --- inside one group ---------------------------------------------------------------------------------------


class Plan(Message, frozen=True):
    """Leader -> its ranks: what step `step` runs; `body` is the engine's own encoding."""

    step: Count
    body: bytes


class OpenSend(Message, frozen=True):
    """Prefill leader -> its ranks: a request starts; its KV lies in `pages` and goes to the ticket's
    group.
    """

    key: RequestKey
    ticket: Ticket
    pages: list[Count]


class RankSent(Message, frozen=True):
    """Prefill rank -> its leader: all this rank's segments of the ticket have left; pages may be freed."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    nbytes: Count
    segments: Count
    messages: Count
    seconds: Seconds


class OpenReceive(Message, frozen=True):
    """Decode leader -> its ranks: a ticket was made; its KV comes from `prefill_group` and goes into
    `pages`.
    """

    ticket: Ticket
    pages: list[Count]
    prefill_group: str


class RankOpened(Message, frozen=True):
    """Decode rank -> its leader: segments of the ticket may come."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class CloseTransfer(Message, frozen=True):
    """Leader -> its ranks: stop moving this ticket's KV; answered by `RankClosed`. Safe to repeat."""

    key: RequestKey
    ticket: TicketNumber
    reason: str


class RankClosed(Message, frozen=True):
    """Rank -> its leader: nothing of the ticket is read or written here any more; its pages may be reused."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class Landed(Message, frozen=True):
    """Decode rank -> its leader: every segment of the ticket meant for this rank is in its pages."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank


class Swapped(Message, frozen=True):
    """Decode rank -> its leader: a copy of pages that a plan ordered is done, or `error` says why not."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    seconds: Seconds
    error: str = ""


class RankFailed(Message, frozen=True):
    """Rank -> its leader: this request cannot go on here."""

    key: RequestKey
    ticket: TicketNumber
    rank: Rank
    code: str
    message: str


class RankBroken(Message, frozen=True):
    """Rank -> its leader: a step failed here; the group can compute no more."""

    rank: Rank
    reason: str


# --- transfer: prefill rank <-> decode rank -----------------------------------------------------------------
# The first eight go as letters (`transport.letters`), the others over the control channel.


class LeaseRequest(Message, frozen=True):
    """Prefill rank -> decode rank: ring space for these segments, please."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    segments: list[Segment]


class LeaseGrant(Message, frozen=True):
    """Decode rank -> prefill rank: `(segment index, ring position)` pairs, with the ring as it stands."""

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    starts: list[tuple[SegmentIndex, Count]]
    ring_bytes: Count
    watermark: Count


class Watermark(Message, frozen=True):
    """Decode rank -> prefill ranks: the ring is free up to here. Only ever grows."""

    dst_rank: Rank
    watermark: Count
    ring_bytes: Count


class SendAgain(Message, frozen=True):
    """Decode rank -> prefill rank: a segment's checksum does not fit its bytes: send the segment once more.

    Into the same lease, or by the same write. Safe to repeat.
    """

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank
    segment: SegmentIndex


class TransferVerified(Message, frozen=True):
    """Decode rank -> each of its prefill ranks: the ticket's segments are in their pages, all checksums fit."""

    key: RequestKey
    ticket: TicketNumber
    dst_rank: Rank


class ProbeRequest(Message, frozen=True):
    """Prefill rank -> decode rank: may I time messages to your ring, of `nbytes` at most? Safe to repeat."""

    number: ProbeNumber
    """Drawn at random; stands in the tag of the messages."""
    nbytes: Annotated[int, msgspec.Meta(ge=1)]


class ProbeAnswer(Message, frozen=True):
    """Decode rank -> prefill rank: the messages may come, to a rank on `host` and `device`; or why not now."""

    number: ProbeNumber
    host: Label
    device: Label
    refused: str = ""
    """Empty: ring space is set aside. Else a reason that may pass: ask again."""


class ProbeEnded(Message, frozen=True):
    """Prefill rank -> decode rank: no more messages come, and what is set aside for them is free."""

    number: ProbeNumber


class PoolOffer(Message, frozen=True):
    """Decode rank -> prefill rank: my pool and my fence words, to be opened and written by your kernels."""

    dst_rank: Rank
    pools: tuple[MemoryHandle, ...]
    """Of each class of layers."""
    fences: MemoryHandle


class PoolRefused(Message, frozen=True):
    """Prefill rank -> decode rank: I cannot open your pool; tickets opened here from now on are not written to it."""

    src_rank: Rank
    reason: str


class SenderEnded(Message, frozen=True):
    """Prefill rank -> decode rank: I sent `sent` and send nothing more for this ticket."""

    key: RequestKey
    ticket: TicketNumber
    src_rank: Rank
    sent: list[SegmentIndex]
    reason: str
    again: list[SegmentIndex] = []
    """Those of them that were sent a second time."""


class StopSending(Message, frozen=True):
    """Decode rank -> prefill rank: send nothing more for this ticket; answered by `SenderEnded`."""

    key: RequestKey
    ticket: TicketNumber
    reason: str


def encode(message: Message, max_bytes: int = MAX_MESSAGE_BYTES) -> bytes:
    """The message as bytes. Raises `ProtocolError` when they are more than `max_bytes`."""
    body = _ENCODER.encode(message)
    if len(body) > max_bytes:
        raise ProtocolError(
            f"{type(message).__name__} takes {len(body)} bytes; a message may take {max_bytes} bytes "
            f"(control.max_message_bytes, {MAX_MESSAGE_BYTES} at most)"
        )
    return body


def decode(body: bytes) -> Message:
    """The inverse of `encode`. Raises `ProtocolError` that says what is wrong; whatever the bytes, nothing
    else.
    """
    if len(body) > MAX_MESSAGE_BYTES:
        raise ProtocolError(f"message of {len(body)} bytes is larger than {MAX_MESSAGE_BYTES}")
    try:
        return _DECODER.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise ProtocolError(f"message of {len(body)} bytes cannot be read: {exc}") from exc


def _packed(value: object) -> bytes:
    """Token ids as they cross the wire: their memory, which costs nothing to write or to read."""
    if isinstance(value, array):
        return value.tobytes()
    raise NotImplementedError(f"no message has a field of type {type(value).__name__}")


def _unpacked(kind: type, value: Any) -> TokenIds:
    if not isinstance(value, bytes):
        raise ValueError(f"token ids are bytes, not {type(value).__name__}")
    return unpack_tokens(value)


MESSAGE_TYPES: tuple[type[Message], ...] = tuple(Message.__subclasses__())
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_packed)
# A union made at run time: the classes above are the one list of messages there is.
_DECODER: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(
    Union[MESSAGE_TYPES],  # noqa: UP007
    dec_hook=_unpacked,
)
