"""State of one request on the decode side, and of its sequences: scheduler, preemptor and leader share it."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.core.tokens import tokens_at
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.model.sampled_tokens import token_of
from disagg.model.sampling.beam_search import BeamSearch
from disagg.model.sampling.penalties import TokenHistory
from disagg.node.kv_manager import BlockTable, Layout


class Residency(enum.Enum):
    """Where the KV of a request is."""

    RESIDENT = "resident"
    """The KV is in the request's pages, is being sent to them by the prefill group, or is being recomputed."""
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
    """One answer, or one beam. The sequences of a request share the prompt's pages."""

    number: int
    """Index of the answer; without meaning for a beam."""
    sampling: SamplingParams
    block_table: BlockTable
    prompt: array[int] = field(repr=False)
    """The request's prompt."""
    computed_tokens: int
    """Positions whose KV is in its pages, or in the request's blocks."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the answer so far; the prefill group samples the first token."""
    score: float = 0.0
    """Sum of the log-probabilities of a beam's tokens."""
    history: TokenHistory | None = None
    """Token counts for penalties, used by the compute thread. None without penalties."""
    published_pages: list[int] = field(default_factory=list, repr=False)
    """Pages as the ranks have them in their request-to-token tables."""
    ended: bool = False
    """True when no further step computes the sequence; its pages are freed once no step uses them."""
    ahead_tokens: int = 0
    """Tokens that steps in flight compute, and sample: behind `computed_tokens` and behind `tokens`."""
    work_index: int = 0
    """Index of its work item in the plan of the latest step that computes it."""
    state_source: int = -1
    """Row whose recurrent state a fork's row copies before its first step; -1: none."""
    awaits_state: bool = False
    """During recomputation: another sequence computes the tokens that both share, and gives its state there."""
    state_heirs: list[tuple[int, Sequence]] = field(default_factory=list, repr=False)
    """During recomputation: positions, ascending, at which another sequence receives the recurrent state."""

    @property
    def known_tokens(self) -> int:
        """Number of tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def left_tokens(self) -> int:
        """Number of tokens to compute before the next one is sampled: 1, more during recomputation."""
        return len(self.prompt) + len(self.tokens) - self.computed_tokens

    @property
    def may_go_on(self) -> bool:
        """False when the sequence ends with its latest token, or with a token that a step in flight samples."""
        return not self.ended and len(self.tokens) + self.ahead_tokens < self.sampling.max_tokens

    def last_token(self) -> int:
        """Returns the token that the next step computes, or a reference to it; not during recomputation."""
        return token_of(self.work_index) if self.ahead_tokens else self.tokens[-1]

    def next_tokens(self, count: int) -> list[int]:
        """Returns the `count` tokens behind the computed ones."""
        start = self.computed_tokens
        return tokens_at(self.prompt, self.tokens, start, start + count)

    def begin_like(self, other: Sequence) -> bool:
        """Returns whether its new row begins as a copy of `other`'s; if so, publishes the common pages."""
        if self.published_pages or other is self:
            return False
        pages = self.block_table.pages
        self.published_pages = pages[: common_pages(pages, other.published_pages)]
        return bool(self.published_pages)

    def publish_pages(self) -> tuple[int, list[int]]:
        """Returns the pages that are new to the ranks, behind the index of the first one, and marks them published.

        At most the last published page can differ: it was shared and not full (copy on write).
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
class Resumption:
    """The remains of a request's earlier attempt, which lost a group: tokens, row and pages."""

    answered: Tokens[int] = ()
    """Tokens of the answer so far."""
    block_table: BlockTable | None = None
    """Row and pages of the earlier attempt in this group, passed to the new request; None: none are left."""
    kept_tokens: int = 0
    """The first tokens whose KV is complete in `block_table`: whole pages."""
    only_kept: bool = False
    """True when other requests wait for room: without `block_table` this request must wait behind them."""


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request. Its sequences are preempted together."""

    key: RequestKey
    ticket: Ticket
    age: int
    """Number of its ticket in the order of admission: smaller is older."""
    prompt: array[int]
    """Kept for recomputation."""
    sampling: SamplingParams
    router: str
    prefill_group: str
    deadline_s: float
    """Time limit of the request, on the leader's clock."""
    sequences: list[Sequence]
    """Sequences that hold pages. One of them has the ticket's row, at first the first one."""
    prefix: PrefixKey | None = None
    """Key of the prompt in the prefix cache; None: its pages are not cached."""
    search: BeamSearch | None = None
    """None unless the request is a beam search."""
    begun: bool = False
    """True once the first tokens have come from the prefill group."""
    again: bool = False
    """True during recomputation, in which no new token is sampled."""
    some_ended: bool = False
    """True while an ended sequence holds pages."""
    residency: Residency = Residency.RESIDENT
    blocks: list[int] = field(default_factory=list)
    """Host blocks: from the copy out until the copy back has ended, or the request is settled."""
    layout: Layout | None = None
    """How its sequences shared the pages that they gave up; None unless it was preempted."""
    swapped_ranks: set[int] = field(default_factory=set)
    """Ranks that have ended the copy under way."""
    held: bool = False
    """The request is closing, but keeps row and pages for another attempt: the prefill group was lost."""
    successor: RequestKey | None = None
    """The attempt that takes over row and pages once the request is settled."""
    kept: BlockTable | None = None
    """First block table of the request, from its settlement to the admission of its successor."""
    kept_row: BlockTable | None = None
    """The ticket's row without pages, if the sequence that had it has ended and others have not.

    Only with recurrent states: otherwise another sequence takes the row over.
    """
    landed_tokens: dict[int, int] = field(default_factory=dict)
    """Number of the ticket's first tokens whose KV has landed, by rank that has closed."""
    steps: int = 0
    """Number of steps in flight that compute the request; none of its pages may be freed unless 0."""
    closing: bool = False
    release_requested: bool = False
    """True when the router waits for `Released`."""
    opened_ranks: set[int] = field(default_factory=set)
    landed_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)

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
        """True when the outcome of a step in flight decides how the next step of the request is planned."""
        drawn_on_host = self.sampling.beams > 0 or self.sequences[0].history is not None
        return drawn_on_host or self.again

    @property
    def left_tokens(self) -> int:
        """Number of tokens to recompute, before each sequence computes its last known token."""
        return sum(sequence.left_tokens - 1 for sequence in self.sequences)

    @property
    def block_tables(self) -> list[BlockTable]:
        """Block tables of the request's sequences."""
        return [sequence.block_table for sequence in self.sequences]

    @property
    def held_tables(self) -> list[BlockTable]:
        """All block tables of the request: those of the sequences, and `kept_row`."""
        return self.block_tables + ([self.kept_row] if self.kept_row is not None else [])

    @property
    def copying(self) -> bool:
        """True while ranks copy between its pages and its host blocks: neither may be freed."""
        return self.residency in (Residency.LEAVING, Residency.RETURNING)

    def pages(self) -> list[int]:
        """Returns the distinct pages of its sequences, in the order in which `Layout` numbers them."""
        return list(dict.fromkeys(page for one in self.sequences for page in one.block_table.pages))
