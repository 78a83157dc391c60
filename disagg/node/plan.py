"""Scheduler output: the content of one step of a group.

The leader sends the same `StepPlan` to every rank. A page of a request is named once, in the first work item that
needs the page; ranks keep it in the request's row of the request-to-token table. The row of a fork starts as a copy.

A plan may be made while the previous step still runs. The tokens that the previous step samples are then unknown. The
new plan refers to such a token by the work item that samples it (`disagg.model.sampled_tokens.token_of`).
"""

from __future__ import annotations

import msgspec

from disagg.core.tokens import TokenIds
from disagg.core.types import RequestKey, Span
from disagg.kv.cache_operations import CacheOperation, StorageOperation
from disagg.kv.page_values import PageCopy


class Work(msgspec.Struct, frozen=True, array_like=True):
    """One work item: `tokens` at positions `start ...` of the request at `row`."""

    key: RequestKey
    reservation: int
    """Number of the request's reservation of row and pages. With `key`, the number identifies the row's content."""
    row: int
    start: int
    tokens: list[int]
    """Token ids, or a reference to the token that a work item of the previous plan samples."""
    prompt_tokens: int
    """Length of the request's whole prompt, without an answer so far."""
    pages: list[int] = []
    """Pages of the request that no earlier work item named. The first work item names all pages, also cached ones."""
    first_page: int = 0
    """Index of the first of `pages` among the request's pages."""
    like: int = -1
    """For a fork: row from which the slots of the first `first_page` pages are copied, after all `pages` of the plan
    have been written; -1: none."""
    last: bool = False
    """Whether this is the last chunk of a prompt (or of a prompt and its answer so far, in a recomputation)."""
    early: bool = False
    """Whether a prefill group computes this work before it has the request's ticket."""
    saves: list[tuple[int, int]] = []
    """(position, slot) for each position inside of the span whose recurrent state is copied to a slot, ascending."""
    likeliest: int | None = None
    """Number of most probable tokens to report with each prompt token; None: no log-probabilities of the prompt."""
    next_token: int = -1
    """The prompt's token after the span, for `likeliest`; -1 at the prompt's end."""
    awaited: bool = False
    """Whether the decode group computes the positions behind this work and waits for each layer of it, so that KV is
    sent after few layers at a time."""

    @property
    def span(self) -> Span:
        """Positions that this work computes."""
        return Span(self.start, self.start + len(self.tokens))

    @property
    def targets(self) -> list[int]:
        """The prompt's tokens whose log-probabilities the step computes, from position `start + 1` on."""
        if self.likeliest is None:
            return []
        return [*self.tokens[1:], self.next_token][: max(0, self.prompt_tokens - 1 - self.start)]


class Swap(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a request's pages to host memory (`out`) or back; each rank copies its own heads.

    Ranks copy while steps run, and report the end to the leader (`transport.control.messages.Swapped`).
    """

    key: RequestKey
    ticket: int
    out: bool
    pages: list[int]
    blocks: list[int]
    """Blocks of host memory, one for each page."""


class StateCopy(msgspec.Struct, frozen=True, array_like=True):
    """A copy of a recurrent state from one slot of the `MambaPool` to another. A row's slot has the row's number."""

    source: int
    destination: int


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass of the whole group, with page copies and swaps; `work` may be empty."""

    step: int
    work: list[Work]
    swaps: list[Swap] = []
    """Swaps that start after the previous step; this step does not use their pages."""
    copies: list[PageCopy] = []
    """Page copies that precede the step, launched together: no page is both source and destination."""
    shared: bool = False
    """Whether every rank receives the tokens that this step samples, because the next plan may refer to them."""
    state_copies: list[StateCopy] = []
    """Copies of recurrent states to rows, all at once before the step, so that a slot may be source and
    destination."""
    state_saves: list[StateCopy] = []
    """Copies of recurrent states of rows, after the step."""
    cache_operations: list[CacheOperation] = []
    """Copies between tiers of the prefix cache. Stores copy KV and states that steps before this plan computed.
    Loads run beside steps; see `awaited_loads`."""
    awaited_loads: list[int] = []
    """Numbers of the loads, of this plan or of earlier plans, that the step reads and that some rank has not
    reported. The step waits for them on the device, and runs layer by layer, so that first layers compute while later
    layers load. Empty in a decode group, whose requests wait for the ranks' reports."""
    arriving_ticket: int | None = None
    """Ticket whose KV still arrives while the step computes the tail of its prompt. Each rank waits for each layer
    when the step reaches it. Only in a decode group."""
    dropped: list[tuple[RequestKey, int]] = []
    """(key, reservation) of each request that had `early` work and has ended."""
    storage_operations: list[StorageOperation] = []
    """Operations on the third tier of the prefix cache, which ranks perform while steps run."""
    unwanted_fetches: list[int] = []
    """Numbers of fetches of earlier plans that the ranks end now. Pages that have landed are kept."""

    @property
    def waits(self) -> bool:
        """Whether the step waits for KV, so that it runs layer by layer."""
        return bool(self.awaited_loads) or self.arriving_ticket is not None

    def encode(self) -> bytes:
        """Returns the encoding for `transport.control.messages.Plan.body`."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(body: bytes) -> StepPlan:
        """Decodes the output of `encode`. Raises `msgspec.DecodeError`."""
        return _DECODER.decode(body)


def token_after(prompt: TokenIds, stop: int) -> int:
    """Returns the prompt's token at position `stop`, or -1 at the prompt's end."""
    return prompt[stop] if stop < len(prompt) else -1


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)
