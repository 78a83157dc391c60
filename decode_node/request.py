"""State of one request on the decode side and of its sequences, shared by scheduler, preemptor and leader."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import TokenIds, tokens_at
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.beam_search import BeamSearch
from disagg.model.sampling.constraints import AnswerConstraint
from disagg.model.sampling.penalties import TokenHistory
from disagg.node.block_table import BlockTable, Layout


class Residency(enum.Enum):
    """Location of a request's KV: pages, host memory, or in between."""

    RESIDENT = "resident"
    """The KV is in the request's pages, or is being received or recomputed into these pages."""
    LEAVING = "leaving"
    """The KV is in the request's pages, which every rank is copying to host memory."""
    OUT = "out"
    """The KV is in host memory. A request without host blocks has no KV and is recomputed later."""
    RETURNING = "returning"
    """The KV is in host memory, from which every rank is copying it to new pages."""


def common_pages(one: list[int], other: list[int]) -> int:
    """Returns the length of the longest common prefix of two page lists."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer or one beam of a request. The sequences of a request share the prompt's pages."""

    number: int
    """Index of the answer; without meaning for a beam."""
    sampling: SamplingParams
    block_table: BlockTable
    prompt: array[int] = field(repr=False)
    """The request's prompt."""
    computed_tokens: int
    """Number of positions whose KV is in the sequence's pages, or in the request's host blocks."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer so far; the prefill group samples the first token."""
    score: float = 0.0
    """Sum of the log-probabilities of a beam's tokens."""
    history: TokenHistory | None = None
    """Token counts for penalties, used by the compute thread. None without penalties."""
    constraint: AnswerConstraint | None = None
    """Grammar of the answer; None without one."""
    published_pages: list[int] = field(default_factory=list, repr=False)
    """Pages of the sequence that the ranks have in their request-to-token tables."""
    ended: bool = False
    """True when no further step computes the sequence; its pages are freed once no step uses them."""
    ahead_tokens: int = 0
    """Number of tokens that steps in flight compute after `planned_tokens`, and sample after `tokens`."""
    chunk_ahead_tokens: int = 0
    """Number of prompt tokens that steps in flight compute after `computed_tokens`, without sampling a token."""
    work_index: int = 0
    """Index of the sequence's work item in the plan of the latest step that computes the sequence."""
    state_source: int = -1
    """Row whose recurrent state a fork's row copies before its first step; -1: none."""
    awaits_state: bool = False
    """During recomputation: whether another sequence computes the shared tokens, and then passes on its recurrent
    state."""
    state_heirs: list[tuple[int, Sequence]] = field(default_factory=list, repr=False)
    """During recomputation: ascending positions, each with a sequence that receives this sequence's recurrent state
    there."""

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def left_tokens(self) -> int:
        """Number of tokens to compute before the next token is sampled: 1, or more during recomputation."""
        return len(self.prompt) + len(self.tokens) - self.computed_tokens

    @property
    def planned_tokens(self) -> int:
        """Number of positions whose KV is computed, or is computed by chunks in flight."""
        return self.computed_tokens + self.chunk_ahead_tokens

    @property
    def may_go_on(self) -> bool:
        """Whether the sequence can get another token: False if ended, or if steps in flight reach the limit."""
        return not self.ended and len(self.tokens) + self.ahead_tokens < self.sampling.max_tokens

    def add(self, token: int) -> None:
        """Appends a token to the answer, and starts the computation of the grammar's next mask."""
        self.tokens.append(token)
        if self.constraint is not None:
            self.constraint.prepare(self.tokens)

    def last_token(self) -> int:
        """Returns the token that the next step computes, or a reference to it while a step in flight samples it.

        Not used during recomputation.
        """
        if self.ahead_tokens:
            return token_of(self.work_index)
        return self.tokens[-1] if self.tokens else self.prompt[-1]

    def next_tokens(self, count: int) -> list[int]:
        """Returns the first `count` tokens whose KV is neither computed nor planned."""
        start = self.planned_tokens
        return tokens_at(self.prompt, self.tokens, start, start + count)

    def begin_like(self, other: Sequence) -> bool:
        """Returns True if the ranks should begin this sequence's new row as a copy of the row of `other`.

        The common pages then count as published.
        """
        if self.published_pages or other is self:
            return False
        pages = self.block_table.pages
        self.published_pages = pages[: common_pages(pages, other.published_pages)]
        return bool(self.published_pages)

    def publish_pages(self) -> tuple[int, list[int]]:
        """Returns the index of the first page that is new to the ranks, and all new pages; marks them published.

        Of the published pages, only the last one can differ: copy on write replaces a shared page that is not full.
        """
        published, pages = self.published_pages, self.block_table.sequence.pages
        first = len(published)
        if published and published[-1] != pages[first - 1]:
            first -= 1
        elif first == len(pages):
            return first, []
        new = pages[first:]
        published[first:] = new
        return first, new


@dataclass(frozen=True, slots=True)
class NewRequest:
    """A request as the decode group admits it."""

    key: RequestKey
    prompt: TokenIds
    sampling: SamplingParams
    router: str
    prefill_group: str
    deadline_s: float
    """Time limit of the request, on the leader's clock."""
    prefix: PrefixKey | None = None
    """Key of the prompt in the prefix cache; None if the request's pages must not be cached."""
    tail_tokens: int = 0
    """Number of the prompt's last tokens that the group computes itself. At least one token is transferred."""


@dataclass(frozen=True, slots=True)
class Resumption:
    """State of a request's failed attempt that the next attempt reuses: answer tokens, row and pages."""

    answered: Tokens[int] = ()
    """Tokens of the answer so far."""
    block_table: BlockTable | None = None
    """Row and pages of the earlier attempt in this group, passed to the new request; None if they were freed."""
    kept_tokens: int = 0
    """Number of leading tokens whose KV is complete in `block_table`; they fill whole pages."""
    only_kept: bool = False
    """True when other requests wait for rows or pages: without `block_table` this request must queue after them."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """A request on the decode side. Its sequences are preempted together."""

    key: RequestKey
    ticket: Ticket
    age: int
    """Number of the ticket in the order of admission: an older request has a smaller number."""
    prompt: array[int]
    """Tokens of the prompt, kept for recomputation."""
    sampling: SamplingParams
    router: str
    prefill_group: str
    deadline_s: float
    """Time limit of the request, on the leader's clock."""
    sequences: list[Sequence]
    """Sequences that hold pages. One of them has the ticket's row; initially this is the first sequence."""
    prefix: PrefixKey | None = None
    """Key of the prompt in the prefix cache; None if the request's pages must not be cached."""
    priority: int = 0
    """Requests with a lower number are preempted last."""
    search: BeamSearch | None = None
    """State of the beam search; None if the request is no beam search."""
    begun: bool = False
    """True once the first tokens have arrived from the prefill group; with `local` from the start, with `tail` once
    all KV has landed."""
    local: bool = False
    """Whether this group computes the prompt itself, so that no KV is transferred."""
    tail: bool = False
    """Whether this group computes the last tokens of the prompt, behind the KV that the prefill group sends."""
    first_sent: bool = False
    """With `local` or `tail`: whether the router has the first token of this attempt."""
    again: bool = False
    """True during recomputation, or computation of the prompt, in which no new token is sampled."""
    some_ended: bool = False
    """True while an ended sequence holds pages."""
    residency: Residency = Residency.RESIDENT
    blocks: list[int] = field(default_factory=list)
    """Host blocks: from the copy out until the copy back has ended, or the request is settled."""
    layout: Layout | None = None
    """How the sequences shared their pages before the preemption; None unless the request is preempted."""
    swapped_ranks: set[int] = field(default_factory=set)
    """Ranks that have completed the running copy to or from host memory."""
    held: bool = False
    """Whether the closing request keeps row and pages for another attempt, because its prefill group was lost or its
    transfer failed."""
    successor: RequestKey | None = None
    """Key of the attempt that takes over row and pages once this request is settled."""
    kept: BlockTable | None = None
    """The first block table, kept from the settlement of this request to the admission of its successor."""
    kept_row: BlockTable | None = None
    """The ticket's row, without pages, if the sequence in that row has ended before other sequences. Always None
    without recurrent states, because another sequence then takes over the row."""
    landed_tokens: dict[int, int] = field(default_factory=dict)
    """Number of the ticket's leading tokens whose KV has landed, by rank; only ranks that have sent `RankClosed`."""
    steps: int = 0
    """Number of steps in flight that compute the request. The request's pages may be freed only when the number is 0.
    """
    closing: bool = False
    release_requested: bool = False
    """True when the router waits for `Released`."""
    opened_ranks: set[int] = field(default_factory=set)
    arriving_ranks: set[int] = field(default_factory=set)
    """With `tail`: ranks that have the first layer of all KV that is sent."""
    landed_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)

    @property
    def order(self) -> tuple[int, int]:
        """Place in the order in which requests get pages: by priority, then by age."""
        return self.priority, self.age

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt)

    @property
    def in_step(self) -> bool:
        """True while a step computes the request."""
        return self.steps > 0

    @property
    def step_decides(self) -> bool:
        """True when the request's next step can be planned only after the commit of its step in flight."""
        if self.again and not self.samples_first:
            return True
        return self.sampling.beams > 0 or self.sequences[0].history is not None

    @property
    def in_chunks(self) -> bool:
        """Whether the next step computes a chunk of prompt or answer, after which no token is sampled."""
        return self.again and any(one.known_tokens - one.planned_tokens > 1 for one in self.sequences)

    @property
    def prefills(self) -> bool:
        """Whether the group computes the prompt of a new request, or its tail, not that of a preempted one."""
        return (self.local or self.tail) and not self.first_sent

    @property
    def samples_first(self) -> bool:
        """Whether this group, not a prefill group, samples the first token."""
        return self.local or self.tail

    @property
    def left_tokens(self) -> int:
        """Number of tokens to recompute in all sequences, without the last known token of each."""
        return sum(sequence.left_tokens - 1 for sequence in self.sequences)

    @property
    def block_tables(self) -> list[BlockTable]:
        """Block table of each of `sequences`, in order, without `kept_row`."""
        return [sequence.block_table for sequence in self.sequences]

    @property
    def held_tables(self) -> list[BlockTable]:
        """All block tables of the request: `block_tables`, then `kept_row` if there is one."""
        return self.block_tables + ([self.kept_row] if self.kept_row is not None else [])

    @property
    def loading(self) -> bool:
        """Whether a rank may still be loading cached KV into the request's pages."""
        for one in self.sequences:  # for each running request in each plan: builds no list
            if one.block_table.load is not None and not one.block_table.load.done:
                return True
        return self.kept_row is not None and self.kept_row.loading

    @property
    def copying(self) -> bool:
        """True while ranks copy between the request's pages and its host blocks: neither may be freed."""
        return self.residency in (Residency.LEAVING, Residency.RETURNING)

    def pages(self) -> list[int]:
        """Returns the distinct pages of all sequences, in the order in which `Layout` numbers them."""
        return list(dict.fromkeys(page for one in self.sequences for page in one.block_table.pages))
