"""A prefill step in flight, whose first tokens are sampled on the device and read by the host later."""

from __future__ import annotations

from dataclasses import dataclass

from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.device import DeviceEvent
from disagg.node.plan import StepPlan
from prefill_node.first_tokens import SampledFirstTokens
from prefill_node.request import PrefillRequest


@dataclass(frozen=True, slots=True)
class SampledChunks:
    """The results of a step's chunks, which the host has not read yet."""

    plan: StepPlan
    requests: list[PrefillRequest]
    """The request of each work item."""
    first: SampledFirstTokens
    """First tokens of the prompts that the step completes."""
    scores: PromptScores
    """Log-probabilities of prompt tokens."""
    ended: DeviceEvent
    """Event at the end of the step; also recorded for a step that completes no prompt."""
