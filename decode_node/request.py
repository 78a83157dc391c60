"""One request on the decode side: the books that scheduler, pressure and leader share."""

from __future__ import annotations

import enum
from array import array
from dataclasses import dataclass, field

from disagg.core.prefixes import PrefixKey
from disagg.core.types import RequestKey, SamplingParams, Ticket
from disagg.model.penalties import TokenHistory
from disagg.node.ledger import Holding


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


@dataclass(slots=True, eq=False)
class DecodeRequest:
    """Preempted as one: what holds several sequences would hold several `Holding`s, given up and taken together."""

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
    holding: Holding
    computed_tokens: int
    """Positions whose KV is in the request's pages or blocks."""
    holds_state: bool
    """Behind the prompt's pages lies a recurrent state, until the first step has read it."""
    prefix: PrefixKey | None = None
    """The prompt as the prefix cache knows it; None: nobody may have what becomes of it."""
    tokens: list[int] = field(default_factory=list)
    """The answer so far; the first one comes from the prefill group."""
    history: TokenHistory | None = None
    """For penalties; the compute thread's. None when the request has none."""
    place: Place = Place.RESIDENT
    blocks: list[int] = field(default_factory=list)
    """Of host memory. Its own from when it is swapped out until it is back, or over."""
    swapped_tokens: int = 0
    """Tokens whose pages were copied to the blocks."""
    swapped_ranks: set[int] = field(default_factory=set)
    """Those that have done with the copy under way."""
    told_pages: int = 0
    """How many of its pages the ranks have in their request-to-token tables."""
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
    def known_tokens(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt) + len(self.tokens)

    @property
    def left_tokens(self) -> int:
        """Tokens to be computed before the next one can be chosen: 1, and more of one that is computed again."""
        return len(self.prompt) + len(self.tokens) - self.computed_tokens

    @property
    def copying(self) -> bool:
        """Ranks read or write its pages and its blocks beside the steps: neither may be freed."""
        return self.place in (Place.LEAVING, Place.RETURNING)

    def next_tokens(self, count: int) -> list[int]:
        """The `count` tokens behind those that are computed."""
        inside = len(self.prompt)
        start, end = self.computed_tokens, self.computed_tokens + count
        if start >= inside:
            return self.tokens[start - inside : end - inside]
        return [*self.prompt[start:end], *self.tokens[: max(0, end - inside)]]
