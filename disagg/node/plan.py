"""What one step of a group runs, as the leader tells its ranks.

A leader decides, then sends the same `StepPlan` to every rank; ranks never decide on their own. Pages travel once,
with the first work of a request; afterwards its row in the request-to-token table is known everywhere.
"""

from __future__ import annotations

import msgspec

from disagg.core.types import RequestKey, Span


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
    """All the request's pages, in the request's first work only."""

    @property
    def span(self) -> Span:
        """Positions that this work computes."""
        return Span(self.start, self.start + len(self.tokens))


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass of the whole group."""

    step: int
    work: list[Work]

    def encode(self) -> bytes:
        """For `transport.messages.Plan.body`."""
        return _ENCODER.encode(self)

    @staticmethod
    def decode(body: bytes) -> StepPlan:
        """The inverse of `encode`; raises `msgspec.DecodeError` on anything else."""
        return _DECODER.decode(body)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(StepPlan)
