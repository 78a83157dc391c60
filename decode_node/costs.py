"""Estimates the cost of preemption by recomputing a request's KV, or by swapping the KV to host memory and back."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["recompute", "swap"]

SWAP_BYTES_PER_S = 16e9
"""Assumed rate of a swap until one is measured: large copies over PCIe 4 x16, in one direction."""
COMPUTE_TOKENS_PER_S = 8e3
"""Assumed rate of recomputation until one is measured: 8B parameters on a recent GPU (docs/performance.md)."""
STEPS_PER_S = 50.0
"""Assumed rate of decode steps (one token of each request) until one is measured."""
SWAP_OVERHEAD_S = 2e-3
"""Fixed cost of a swap: two orders to the ranks, their replies, and the steps in between, which omit the request.
For a short request recomputation is faster, because its tokens share steps with those of other requests."""
SHARE = 0.2
"""Weight of the newest measurement in an estimate, small enough that one unusual step does not change the choice."""


def cheaper(pages: int, tokens: int, rates: CostEstimates, *, steps: int = 0) -> Kind:
    """Returns the faster kind of preemption.

    Compares a copy of `pages` to host memory and back with the recomputation of `tokens` in chunks and of `steps`
    further tokens one by one.
    """
    swap_s = SWAP_OVERHEAD_S + 2 * pages / rates.pages_per_s
    again_s = tokens / rates.tokens_per_s + steps / rates.steps_per_s
    return "swap" if swap_s < again_s else "recompute"


class CostEstimates(NamedTuple):
    """Estimated rates of page copies, recomputation and decode steps."""

    pages_per_s: float
    """Pages per second that the slowest rank copies in one direction."""
    tokens_per_s: float
    """Recomputed tokens per second; other tokens of the same steps are not counted."""
    steps_per_s: float = STEPS_PER_S
    """Steps per second that compute one token of each request."""

    @staticmethod
    def of(page_bytes: int) -> CostEstimates:
        """Returns the estimates before any measurement; `page_bytes`: page size of the rank with the most heads."""
        return CostEstimates(SWAP_BYTES_PER_S / page_bytes, COMPUTE_TOKENS_PER_S)

    def copied(self, pages: int, seconds: float) -> CostEstimates:
        """Returns the estimates after a copy of `pages` that took `seconds`."""
        return self._replace(pages_per_s=_blend(self.pages_per_s, pages, seconds))

    def computed(self, tokens: int, seconds: float) -> CostEstimates:
        """Returns the estimates after a step that took `seconds` and recomputed `tokens`."""
        return self._replace(tokens_per_s=_blend(self.tokens_per_s, tokens, seconds))

    def stepped(self, seconds: float) -> CostEstimates:
        """Returns the estimates after a step that took `seconds` and computed one token of each request."""
        return self._replace(steps_per_s=_blend(self.steps_per_s, 1, seconds))


def _blend(rate: float, count: int, seconds: float) -> float:
    return rate if seconds <= 0 else (1 - SHARE) * rate + SHARE * count / seconds
