"""Settings of the decode group's scheduler."""

from __future__ import annotations

from dataclasses import dataclass

from decode_node.costs import CostEstimates
from disagg.core.config.read import Preemption
from disagg.model.chunks import PromptChunks


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOptions:
    """Settings of one `DecodeScheduler` and its parts."""

    group: str
    """The group's name."""
    ranks: int
    max_batch: int
    """Largest number of sequences in one step."""
    max_context_tokens: int
    first_ticket: int
    """Number of the first ticket."""
    chunks: PromptChunks
    """Rule that cuts recomputed prompts into chunks. Without recurrent layers, recomputed answers are cut too."""
    state_interval_tokens: int = 1
    """See `GroupConfig.state_interval_tokens`; cached states of a sequence are at least 1/8 of it apart."""
    rates: CostEstimates
    """Estimated rates before the first measurement."""
    steps_ahead: int = 0
    """Number of steps that may be planned before the commit of the step in flight: 0 or 1."""
    preemption: Preemption = "auto"
    watermark: float = 0.0
    """Share of the pages that an admission leaves free."""
    local_prefill_tokens: int = 0
    """Tokens of a step that computes prompts of new requests, one of each running sequence included."""
    tail_tokens: int = 0
    """See `RankInfo.tail_tokens`."""
    has_kv: bool = True
    """False for a model without attention: only the recurrent state lands, and a request has a single page."""
