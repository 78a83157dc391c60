"""A request of a prefill group, from its prompt to the end of its transfer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey, SamplingParams, Ticket, TokenLogprobs
from disagg.kv.storage_tier import Prefetch
from disagg.model.sampling.constraints import AnswerConstraint
from disagg.node.block_table import BlockTable
from disagg.node.state_saves import SavedStates


class First(NamedTuple):
    """First token of each sequence of a prompt, or first candidates of a beam search."""

    tokens: list[int]
    scores: list[float]
    logprobs: list[TokenLogprobs]
    """One entry for each token if the request has `logprobs`, else empty."""


@dataclass(slots=True, eq=False)
class PrefillRequest:
    """State of a request in the scheduler and leader of a prefill group."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    router: str
    deadline_s: float
    """Time limit of the request, on the leader's clock."""
    prefix: PrefixKey | None = None
    """Key of prompt and answer so far in the prefix cache; None: the request does not use the prefix cache. See
    `readable_prefix`."""
    priority: int = 0
    """Requests with a lower number are admitted and computed first."""
    is_head: bool = False
    """Whether `prompt` is only the first part of the request's prompt; see `transport.control.messages.Prefill`."""
    answered: Sequence[int] = ()
    """Tokens of the answer so far, computed like the prompt; see `transport.control.messages.Reserve`."""
    constraint: AnswerConstraint | None = None
    """Grammar state after the answer so far, which gives one mask for all first tokens; None without a grammar."""
    ticket: Ticket | None = None
    """Reservation of the decode group; None until it arrives. A short prompt may be computed without a ticket."""
    block_table: BlockTable | None = None
    prefetch: Prefetch | None = None
    """Prefetch of the prefix from the third tier; None without one."""
    fetch_until_s: float = math.inf
    """Time after which the request no longer waits for its prefetch."""
    states: SavedStates = field(default_factory=SavedStates)
    """Recurrent states for the prefix cache."""
    reservation: int = 0
    """Number of the reservation of `block_table`, unique for the life of the prefill group."""
    admitted: bool = False
    """Whether `OpenSend` was sent to the ranks, so that the end of the request requires `CloseTransfer`."""
    rest_tokens: int | None = None
    """Number of tokens to compute if the request starts before its ticket arrives: all tokens minus the prefix cache
    hit. None before the first attempt of such a start."""
    began_early: bool = False
    """Whether a step has computed part of the reservation before the ticket arrived."""
    planned_tokens: int = 0
    cached_tokens: int = 0
    """Number of leading tokens whose KV came from the prefix cache in the latest reservation."""
    steps_in_flight: int = 0
    """Number of steps in flight that compute the request; until they end, its pages must not be freed."""
    computed: bool = False
    first: First | None = None
    """First tokens that were sampled before the ticket arrived; sent when the ticket arrives."""
    closing: bool = False
    release_requested: bool = False
    """Whether the router waits for `Released`."""
    router_lost: bool = False
    """Whether the router is lost and sends no `Release`. The leader then closes the request when the KV is sent, or
    when the decode group stops the transfer."""
    unwanted: bool = False
    """Whether the decode group has stopped the transfer."""
    sent_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)
    nbytes: int = 0
    segments: int = 0
    messages: int = 0
    transfer_s: float = 0.0

    @property
    def total_tokens(self) -> int:
        """Length of the prompt and of the answer so far."""
        return len(self.prompt) + len(self.answered)

    @property
    def readable_prefix(self) -> PrefixKey | None:
        """`prefix`, if cached KV may be used: the log-probabilities of a prompt need all of its hidden states."""
        return self.prefix if self.sampling.prompt_logprobs is None else None

    @property
    def may_begin(self) -> bool:
        """Whether the prompt may be computed: False while the request's grammar is being compiled."""
        return self.constraint is None or self.constraint.ready

    @property
    def fetches(self) -> bool:
        """Whether the request must wait for its prefetch before it gets pages."""
        return self.prefetch is not None and self.prefetch.holds

    @property
    def is_early(self) -> bool:
        """Whether the request has a row and pages but is not admitted, because it has no ticket."""
        return self.block_table is not None and not self.admitted
