"""A step of a colocated group whose tokens are sampled on the device and read by the host later."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from disagg.colocated.scheduler import ColocatedRequest
from disagg.core.errors import RequestError
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.placed import PlacedTokens
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.model.sampling.sampled import Chosen
from disagg.node.device import DeviceEvent, record_event
from disagg.node.plan import StepPlan


@dataclass(frozen=True, slots=True)
class ColocatedStep:
    """The results of a step in flight."""

    plan: StepPlan
    requests: list[ColocatedRequest]
    """The request of each work item."""
    tokens: PlacedTokens
    """Next tokens of the requests whose prompts are computed."""
    scores: PromptScores
    """Log-probabilities of prompt tokens, for the routers."""
    ended: DeviceEvent
    """Event at the end of the step; also recorded for a step without tokens."""

    @staticmethod
    def launch(
        plan: StepPlan,
        requests: list[ColocatedRequest],
        logits: torch.Tensor,
        scores: PromptScores,
        sampler: Sampler,
    ) -> ColocatedStep:
        """Launches the sampling of a token for each request whose prompt the step has computed.

        `requests`: the request of each work item; `logits`: float32 `[len(plan.work), vocab]`, which the next step
        may overwrite.
        """
        works = zip(plan.work, requests, strict=True)
        answering = [i for i, (work, request) in enumerate(works) if request.samples(work)]
        rows = [_sampling_row(requests[index]) for index in answering]
        tokens = PlacedTokens.launch(logits, answering, rows, sampler)
        return ColocatedStep(plan, requests, tokens, scores, record_event(logits.device))

    def shared_tokens(self) -> torch.Tensor | None:
        """Returns the token of each work item on the device; see `PlacedTokens.on_device`."""
        return self.tokens.on_device()

    def chosen(self) -> list[tuple[ColocatedRequest, Chosen | RequestError]]:
        """Returns the requests that sampled a token, each with the token or an error. Waits for the device."""
        return self.tokens.chosen(self.requests)


def _sampling_row(request: ColocatedRequest) -> SamplingRow:
    """Returns the sampling parameters and state of the request's next token, which the latest plan samples."""
    ahead_tokens = request.ahead_tokens - 1
    return SamplingRow(request.sampling, request.tokens, request.history, ahead_tokens, request.constraint)
