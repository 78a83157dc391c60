"""Phases, triggers and actions of a session."""

from __future__ import annotations

from enum import Enum

import msgspec

from disagg.core.errors import DisaggError
from disagg.router.answers import Output
from transport.control import messages as m


class SessionPhase(Enum):
    """Phase of a session."""

    NEW = "new"
    """The request has not been sent to any leader."""
    RESERVING = "reserving"
    """The decode leader has the `Reserve` request, and queues the request if the group is full."""
    PREFILLING = "prefilling"
    """The prefill leader has the `Prefill` request."""
    DECODING = "decoding"
    """The prefill group has sampled the first tokens."""
    ANSWERED = "answered"
    """Every answer is complete."""
    FAILED = "failed"
    """An error ended the request."""
    MOVED = "moved"
    """The prompt is to be computed by a prefill group, in another session."""
    RELEASING = "releasing"
    """`Release` was sent to the involved leaders; some have not confirmed yet."""
    ENDED = "ended"


class SessionTrigger(Enum):
    """Kind of event that a session handles; key of the inner tables of `TRANSITIONS`."""

    START = "start"
    DEADLINE = "deadline"
    CLOSE = "close"
    RELEASE_TIMEOUT = "release timeout"
    MOVED = "moved"
    """A prefill group is expected to compute the prompt sooner than the decode group that has the prompt."""
    RESERVED = "reserved"
    PROMPT_LOGPROBS = "prompt logprobs"
    PREFILLED = "prefilled"
    TOKENS = "tokens"
    TRANSFERRED = "transferred"
    FAILED = "failed"
    PREFILL_LOST = "prefill lost"
    """The leader of a prefill group that is not colocated is lost."""
    DECODE_LOST = "decode lost"
    SUSPECTED = "suspected"
    """A group that the session needs is silent, and another group can continue the request."""
    RELEASED = "released"
    OTHER = "other"
    """An unexpected message, or the loss of a leader that does not have the request."""
    ALL_ANSWERED = "all answered"
    ALL_RELEASED = "all released"


class SendMessage(msgspec.Struct, frozen=True):
    """Send `message` to the leader at `peer`."""

    peer: str
    message: m.Message


class EmitOutput(msgspec.Struct, frozen=True):
    """Pass `output` to the client."""

    output: Output


class RaiseError(msgspec.Struct, frozen=True):
    """Raise `error` to the client after the request is released."""

    error: DisaggError


class CountPromptComputed(msgspec.Struct, frozen=True):
    """Subtract the prompt from the prefill group's load."""


SessionAction = SendMessage | EmitOutput | RaiseError | CountPromptComputed


class Loss(Enum):
    """Cause of a session's failure after which another session can continue the request."""

    PREFILL = "prefill_lost"
    """The prefill group, or its connection to the decode group, is lost."""
    DECODE = "decode_lost"
    """The decode group, or a colocated group, is lost."""
    PREFILL_SUSPECTED = "prefill_suspected"
    """The prefill group is silent but not lost yet."""
    DECODE_SUSPECTED = "decode_suspected"
    """The decode group, or a colocated group, is silent but not lost yet."""
    DAMAGE = "damaged_kv"
    """KV arrived damaged twice."""
    TRANSFER = "transfer_failed"
    """The transfer failed without the loss of a group: a late lease, a failed send or a failed kernel launch."""

    @property
    def of_group(self) -> bool:
        """Whether the cause is a lost or suspected group, not a single transfer."""
        return self not in (Loss.DAMAGE, Loss.TRANSFER)
