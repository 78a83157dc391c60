"""What one step of a group runs, as the leader tells its ranks.

A leader decides, then sends the same `StepPlan` to every rank; ranks never decide on their own. A page travels once,
with the first work that needs it; afterwards the request's row in the request-to-token table has it everywhere. The
row of a fork begins as a copy of another one's.
"""

from __future__ import annotations

import msgspec

from disagg.core.types import RequestKey, Span
from disagg.kv.page_values import PageCopy


class Work(msgspec.Struct, frozen=True, array_like=True):
    """Compute `tokens` at positions `start ...` of the request at `row`."""

    key: RequestKey
    ticket: int
    row: int
    start: int
    tokens: list[int]
    prompt_tokens: int
    """Length of the request's whole prompt."""
    pages: list[int] = []
    """Those of the request's pages that the ranks do not know yet. In a request's first work all of them, also those
    before `start` whose KV was cached."""
    first_page: int = 0
    """Which of the request's pages the first of `pages` is."""
    like: int = -1
    """A row that begins with the same `first_page` pages, once those of the plan are known; -1: no such row."""

    @property
    def span(self) -> Span:
        """Positions that this work computes."""
        return Span(self.start, self.start + len(self.tokens))


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """Copy a request's pages to host memory (`out`) or back; each rank copies its own heads of them.

    Ranks do it beside their steps, and tell the leader when it is done (`transport.messages.Swapped`).
    """

    key: RequestKey
    ticket: int
    out: bool
    pages: list[int]
    blocks: list[int]
    """Of host memory: each holds as many pages as the group has agreed on, the last one what is left."""


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass of the whole group, and what is copied beside it; one of them may be missing."""

    step: int
    work: list[Work]
    swaps: list[Swap] = []
    """Each is copied after the steps before this one; this step does not touch its pages."""
    copies: list[PageCopy] = []
    """Made before anything of this step is computed, all at once: no page is copied to and from."""

    def encode(self) -> bytes:
        """For `transport.messages.Plan.body`."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(body: bytes) -> StepPlan:
        """The inverse of `encode`; raises `msgspec.DecodeError` on anything else."""
        return _DECODER.decode(body)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)
