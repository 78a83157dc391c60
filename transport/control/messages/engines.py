"""Messages between engines of other projects that use the data path (`disagg.vllm`)."""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.core.bounds import Count, Label
from disagg.core.types import GroupInfo, Ticket
from transport.control.messages.base import Message, Rank


class EngineGroups(Message, frozen=True):
    """Scheduler -> scheduler of another engine, or -> its own ranks: groups of one engine, to be linked."""

    groups: Annotated[list[GroupInfo], msgspec.Meta(max_length=2)]
    """Prefill and decode group of the engine; one of them, or both."""
    answer: bool = False
    """True in a reply. A message with False to a scheduler is always answered."""


class PushRequest(Message, frozen=True):
    """Consumer rank -> producer rank: this rank accepts the ticket's KV; send it. `ticket.key` names the request."""

    ticket: Ticket
    dst_rank: Rank
    held: bool
    """Whether the producer should hold the computed request already. The producer refuses a request that it should
    hold and does not."""
    tokens: Count = 0
    """Number of the prompt's tokens after which a recurrent state is needed. Not used for models without one."""


class PushCancelled(Message, frozen=True):
    """Consumer rank -> producer rank: no KV of this request is needed; the producer may free its blocks."""

    request: Label
    reason: str
