"""Life cycle of a request: messages between routers and leaders, and from prefill to decode leaders."""

from __future__ import annotations

from typing import Annotated

import msgspec

from disagg.core.bounds import Count, Priority, Seconds
from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey, SamplingParams, Ticket, TokenLogprobs
from transport.control.messages.base import Message, TicketNumber


class Reserve(Message, frozen=True):
    """Router -> decode leader: reserve a row and all pages for this prompt."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    deadline_s: Seconds
    """Time left for the whole request; relative, because host clocks differ."""
    prefill_group: str
    cache_salt: str = ""
    """Salt of the prompt: only prompts with the same salt share cached KV."""
    answered: list[Count] = msgspec.field(default_factory=list)
    """Tokens that a lost group has already generated; their KV is transferred after the prompt's. A request with such
    tokens has exactly one sequence."""
    after: RequestKey | None = None
    """The earlier attempt in this group whose row, pages and landed KV this attempt takes over."""
    wait_s: Seconds = 0.0
    """Longest wait of the request for a row and pages; after that, the leader replies `Failed` (busy)."""
    priority: Priority = 0
    """Requests with a lower number are admitted first, and preempted last."""
    tail_tokens: Count = 0
    """Number of the prompt's last tokens that the decode group computes itself. The ticket ends before them, and the
    prefill group gets the prompt without them (`Prefill.is_head`). 0: the prefill group computes the whole prompt."""


class Reserved(Message, frozen=True):
    """Decode leader -> router: the row and the pages are reserved.

    Router -> prefill leader: send the prompt's KV to this ticket. The router has already sent the prompt in
    `Prefill`.
    """

    key: RequestKey
    ticket: Ticket


class Failed(Message, frozen=True):
    """Any node -> router: the request failed on this node. `code` is an error code of `disagg.core.errors`."""

    key: RequestKey
    code: str
    message: str
    retryable: bool
    retry_after_s: Seconds = 0.0
    resumable: bool = False
    """Whether the decode group keeps the row and pages until a new attempt takes them over (`Reserve.after`) or
    `Release` frees them."""


class Prefill(Message, frozen=True):
    """Router -> prefill leader: compute the prompt and send the missing segments of the ticket."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    ticket: Ticket | None
    """The request's ticket; None if the ticket follows in `Reserved`. The prompt may be computed before the ticket
    arrives; the KV is sent afterwards."""
    deadline_s: Seconds
    cache_salt: str = ""
    """Salt of the prompt: only prompts with the same salt share cached KV."""
    answered: list[Count] = msgspec.field(default_factory=list)
    """Tokens of the answer so far; see `Reserve`. The prefill group computes their KV together with the prompt's."""
    priority: Priority = 0
    """Prompts of requests with a lower number are computed first."""
    is_head: bool = False
    """Whether `prompt` is only the first part of the request's prompt: the decode group computes the rest and samples
    the first token, so this group sends neither `Prefilled` nor `FirstTokens`."""


class PromptLogprobs(Message, frozen=True):
    """Prefill leader -> router: log-probabilities of the prompt's tokens at positions `start ...`.

    Sent after each step of a request with `SamplingParams.prompt_logprobs`, in parts of bounded size, before
    `Prefilled`. A position may be sent again if the prompt is computed again.
    """

    key: RequestKey
    start: Count
    logprobs: list[TokenLogprobs]


class Prefilled(Message, frozen=True):
    """Prefill leader -> router: the prompt is computed; the last segments of its KV may still be in flight."""

    key: RequestKey
    first_tokens: list[Count]
    """The next token of each answer, after `Prefill.answered`; empty if the tokens are chosen later (beam search)."""
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """One entry for each first token if the request has `logprobs`, else empty."""
    cached_tokens: Count = 0
    """Number of leading tokens, of prompt and answer so far, whose KV came from the group's prefix cache."""


class Transferred(Message, frozen=True):
    """Prefill leader -> router: every segment has been sent. The counts cover this request on all ranks.

    `messages` counts control messages sent by prefill ranks to decode ranks for this request.
    """

    key: RequestKey
    nbytes: Count
    segments: Count
    messages: Count
    seconds: Seconds
    """Time during which at least one segment was being gathered or sent; the maximum over all ranks."""


class FirstTokens(Message, frozen=True):
    """Prefill leader -> decode leader: the tokens chosen at the prompt's last position.

    `tokens` has the first token of each answer; for beam search, the likeliest tokens in descending order, with their
    log-probabilities in `scores`.
    """

    key: RequestKey
    ticket: TicketNumber
    tokens: Annotated[list[Count], msgspec.Meta(min_length=1)]
    scores: list[float] = msgspec.field(default_factory=list)


class Tokens(Message, frozen=True):
    """Decode leader -> router: the tokens of an answer from `index` on.

    `finish` is the finish reason; None while the answer continues.
    """

    key: RequestKey
    index: Count
    tokens: list[int]
    finish: str | None = None
    logprobs: list[TokenLogprobs] = msgspec.field(default_factory=list)
    """One entry for each of `tokens` if the request has `logprobs`, else empty."""
    answer: Count = 0
    """Index of the answer within the request."""


class StepTokens(Message, frozen=True):
    """Decode leader -> router: the tokens that one step generated for this router's requests."""

    tokens: list[Tokens]


class EndAnswer(Message, frozen=True):
    """Router -> decode leader: end one answer; the request's other answers continue. Idempotent."""

    key: RequestKey
    answer: Count


class Release(Message, frozen=True):
    """Router -> both leaders: the request has ended; free all resources of the request. Idempotent."""

    key: RequestKey
    reason: str


class Released(Message, frozen=True):
    """Leader -> router: the leader's group has freed all resources of the request."""

    key: RequestKey
