"""Scheduler output: the content of one step of a group.

The leader decides and sends the same `StepPlan` to every rank. A plan names each page once, with the first work that
needs the page; afterwards the row in the request-to-token table has it. The row of a fork starts as a copy.

A plan may be made while the step before it still runs. Tokens that this step samples are then unknown, and the plan
refers to them by its work items (`disagg.model.sampled_tokens.token_of`).
"""

from __future__ import annotations

import msgspec

from disagg.core.types import RequestKey, Span
from disagg.kv.page_values import PageCopy


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One work item: `tokens` at positions `start ...` of the request at `row`."""

    key: RequestKey
    ticket: int
    row: int
    start: int
    tokens: list[int]
    """Token ids, or a reference to the token that a work item of the previous plan samples."""
    prompt_tokens: int
    """Length of the request's whole prompt, without an answer so far."""
    pages: list[int] = []
    """Pages of the request that the ranks do not have yet. The first work names all, cached ones too."""
    first_page: int = 0
    """Index of the first of `pages` among the request's pages."""
    like: int = -1
    """Row whose first `first_page` pages are copied, after the plan's own pages are written; -1: none."""
    last: bool = False
    """The last chunk of a prompt, and of an answer so far behind it."""

    @property
    def span(self) -> Span:
        """Positions that this work computes."""
        return Span(self.start, self.start + len(self.tokens))


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a request's pages to host memory (`out`) or back; each rank copies its own heads.

    Ranks copy beside their steps and report the end to the leader (`transport.control.messages.Swapped`).
    """

    key: RequestKey
    ticket: int
    out: bool
    pages: list[int]
    blocks: list[int]
    """Blocks of host memory, each of the same number of pages; the last one may be partly used."""


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass of the whole group, with page copies and swaps; `work` may be empty."""

    step: int
    work: list[Work]
    swaps: list[Swap] = []
    """Swaps that start after the steps before this one; this step does not use their pages."""
    copies: list[PageCopy] = []
    """Page copies that precede the step, launched together: no page is both source and destination."""
    shared: bool = False
    """The next plan may refer to the tokens that this step samples: every rank gets them."""

    def encode(self) -> bytes:
        """Returns the encoding for `transport.control.messages.Plan.body`."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(body: bytes) -> StepPlan:
        """Decodes the output of `encode`. Raises `msgspec.DecodeError`."""
        return _DECODER.decode(body)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)
