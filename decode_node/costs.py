"""What it costs to take a request's pages away: computing them again, or a way to host memory and back."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal["recompute", "swap"]

SWAP_BYTES_PER_S = 16e9
"""Until it is measured: each way over PCIe 4 x16 in large copies, as a rule of thumb."""
COMPUTE_TOKENS_PER_S = 8e3
"""Until it is measured: what a step computes of prompts; 8B parameters on one recent GPU (docs/performance.md)."""
STEPS_PER_S = 50.0
"""Until it is measured: steps of one token for each request."""
SWAP_OVERHEAD_S = 2e-3
"""Of a swap, whatever its size: two orders to the ranks and their answers, with steps in between that go on without
the request. A short request is sooner computed again, beside the others' next tokens."""
SHARE = 0.2
"""Of the newest measurement in what is believed: one odd step does not turn the choice."""


def cheaper(pages: int, tokens: int, rates: Rates, *, steps: int = 0) -> Kind:
    """The way that costs less time: of `pages` both ways, or of computing `tokens`, and `steps` of a token each."""
    swap_s = SWAP_OVERHEAD_S + 2 * pages / rates.pages_per_s
    again_s = tokens / rates.tokens_per_s + steps / rates.steps_per_s
    return "swap" if swap_s < again_s else "recompute"


class Rates(NamedTuple):
    """What is believed at one moment."""

    pages_per_s: float
    """Copied by the slowest rank, one way."""
    tokens_per_s: float
    """Computed by steps that hold more than one token of a request, with all else that they hold."""
    steps_per_s: float = STEPS_PER_S
    """Of those that hold one token of each request."""

    @staticmethod
    def of(page_bytes: int) -> Rates:
        """Before anything was measured; `page_bytes`: of the rank with most heads."""
        return Rates(SWAP_BYTES_PER_S / page_bytes, COMPUTE_TOKENS_PER_S)

    def copied(self, pages: int, seconds: float) -> Rates:
        """After a copy of `pages` that took `seconds`."""
        return self._replace(pages_per_s=_blend(self.pages_per_s, pages, seconds))

    def computed(self, tokens: int, seconds: float) -> Rates:
        """After a step that took `seconds` and computed `tokens` again."""
        return self._replace(tokens_per_s=_blend(self.tokens_per_s, tokens, seconds))

    def stepped(self, seconds: float) -> Rates:
        """After a step that took `seconds` and computed one token of each request."""
        return self._replace(steps_per_s=_blend(self.steps_per_s, 1, seconds))


def _blend(rate: float, count: int, seconds: float) -> float:
    return rate if seconds <= 0 else (1 - SHARE) * rate + SHARE * count / seconds
