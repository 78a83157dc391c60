"""One request on the decode side, and its sequences: the books that scheduler, pressure and leader share."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.model.beam_search import BeamSearch
from disagg.model.penalties import TokenHistory
from disagg.node.ledger import Holding, Layout


class Place(enum.Enum):
    """Where the KV of a request is."""

    RESIDENT = "resident"
    """In its pages, or on its way there from the prefill group; or being computed again."""
    LEAVING = "leaving"
    """Still in its pages, which every rank is copying to host memory."""
    OUT = "out"
    """In host memory; nowhere, when it has no blocks: it is computed again."""
    RETURNING = "returning"
    """In host memory, from where every rank is copying it to new pages."""


def common_pages(one: list[int], other: list[int]) -> int:
    """How many pages both begin with."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return next(at for at in range(most) if one[at] != other[at])


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer that is being made, or one beam. The prompt's KV it shares with the request's other sequences."""

    number: int
    """Which of the request's answers it is; means nothing of a beam."""
    sampling: SamplingParams
    holding: Holding
    prompt: array[int] = field(repr=False)
    """The request's."""
    computed_tokens: int
    """Positions whose KV is in its pages, or in the request's blocks."""
    tokens: list[int] = field(default_factory=list)
    """The answer so far; the first one comes from the prefill group."""
    score: float = 0.0
    """Of a beam: the sum of its tokens' log-probabilities."""
    history: TokenHistory | None = None
    """For penalties; the compute thread's. None when the request has none."""
    told_pages: list[int] = field(default_factory=list, repr=False)
    """Its pages as the ranks have them in their request-to-token tables."""
    ended: bool = False
    """It is not computed any more; what it holds is given back when nobody uses it."""

    @property
    def known_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def left_tokens(self) -> int:
        """Tokens to be computed before the next one can be chosen: 1, and more of one that is computed again."""
        return len(self.prompt) + len(self.tokens) - self.computed_tokens

    def next_tokens(self, count: int) -> list[int]:
        """The `count` tokens behind those that are computed."""
        inside = len(self.prompt)
        start, end = self.computed_tokens, self.computed_tokens + count
        if start >= inside:
            return self.tokens[start - inside : end - inside]
        return [*self.prompt[start:end], *self.tokens[: max(0, end - inside)]]

    def begin_like(self, other: Sequence) -> bool:
        """Whether its row, of which the ranks know nothing, can begin as a copy of `other`'s, and then does."""
        if self.told_pages or other is self:
            return False
        pages = self.holding.pages
        self.told_pages = pages[: common_pages(pages, other.told_pages)]
        return bool(self.told_pages)

    def tell_pages(self) -> tuple[int, list[int]]:
        """The first of its pages that the ranks do not know, or know otherwise, and all from there: now they do.

        At most the last one that they know is another now: it was shared, and not full (copy on write).
        """
        told, pages = self.told_pages, self.holding.sequence.pages
        first = len(told)
        if told and told[-1] != pages[first - 1]:
            first -= 1
        elif first == len(pages):
            return first, []
        untold = pages[first:]
        told[first:] = untold
        return first, untold


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """One request. Its sequences are preempted as one: all their pages are given up and taken together."""

    key: RequestKey
    ticket: Ticket
    age: int
    """Requests are numbered as they get their tickets: the smaller, the older."""
    prompt: array[int]
    """Kept to be computed again."""
    sampling: SamplingParams
    router: str
    prefill_group: str
    deadline_s: float
    """On the leader's clock."""
    sequences: list[Sequence]
    """Those that hold something. One of them has the ticket's row, at first the first."""
    holds_state: bool
    """Behind the prompt's pages lies a recurrent state, until the first step has read it."""
    prefix: PrefixKey | None = None
    """The prompt as the prefix cache knows it; None: nobody may have what becomes of it."""
    search: BeamSearch | None = None
    """None unless the request is a beam search."""
    begun: bool = False
    """The first tokens have come from the prefill group."""
    again: bool = False
    """Some of what its pages are for is to be computed again, before its sequences can go on."""
    some_ended: bool = False
    """One or more of its sequences have ended, and hold something."""
    place: Place = Place.RESIDENT
    blocks: list[int] = field(default_factory=list)
    """Of host memory. Its own from when it is swapped out until it is back, or over."""
    layout: Layout | None = None
    """Of one that is not resident: how the pages that it gave up hang together."""
    swapped_ranks: set[int] = field(default_factory=set)
    """Those that have done with the copy under way."""
    in_step: bool = False
    """A step that computes it is running: nothing of it may be freed."""
    closing: bool = False
    release_asked: bool = False
    """The router waits to hear that nothing of it is left."""
    opened_ranks: set[int] = field(default_factory=set)
    landed_ranks: set[int] = field(default_factory=set)
    closed_ranks: set[int] = field(default_factory=set)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def left_tokens(self) -> int:
        """Tokens to be computed before all of its sequences can go on by one token: more than one of each at most."""
        return sum(sequence.left_tokens - 1 for sequence in self.sequences)

    @property
    def holdings(self) -> list[Holding]:
        """Of its sequences."""
        return [sequence.holding for sequence in self.sequences]

    @property
    def copying(self) -> bool:
        """Ranks read or write its pages and its blocks beside the steps: neither may be freed."""
        return self.place in (Place.LEAVING, Place.RETURNING)

    def pages(self) -> list[int]:
        """The different pages of its sequences, in the order in which `Layout` numbers them."""
        return list(dict.fromkeys(page for one in self.sequences for page in one.holding.pages))
