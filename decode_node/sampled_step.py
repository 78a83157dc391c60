"""A decode step whose tokens are sampled on the device and read by the host later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from decode_node.request import DecodeRequest
from decode_node.request import Sequence as DecodeSequence
from decode_node.step_planner import Stepped
from disagg.core.errors import RequestError
from disagg.kv.upload import upload
from disagg.model.sampling.batch import Sampler
from disagg.model.sampling.beam_search import Candidate
from disagg.model.sampling.next_tokens import BeamStep, SampledBeams
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.placed import PlacedTokens
from disagg.model.sampling.sampled import Chosen
from disagg.node.device import DeviceEvent, record_event
from disagg.node.plan import StepPlan


@dataclass(frozen=True, slots=True)
class SampledStep:
    """Sampled tokens of a step in flight, and the candidates of the step's beam searches."""

    plan: StepPlan
    stepped: list[Stepped]
    """The request and the sequence of each work item."""
    tokens: PlacedTokens
    """Next tokens of the work items without beams."""
    searches: list[DecodeRequest]
    """Requests with beams, in the order of `beams`."""
    beams: SampledBeams | None
    ended: DeviceEvent
    """Event at the end of the step; also recorded for a step of recomputed chunks, which copies no tokens."""

    @staticmethod
    def launch(plan: StepPlan, stepped: list[Stepped], logits: torch.Tensor, sampler: Sampler) -> SampledStep:
        """Launches the sampling of the next tokens from `logits`, float32 `[len(plan.work), vocab]`.

        The next step, which is launched after this call, may overwrite the logits.
        """
        sampled = [index for index, one in enumerate(stepped) if one.samples]
        single = [index for index in sampled if stepped[index].request.search is None]
        rows = [_sampling_row(stepped[index].sequence) for index in single]
        tokens = PlacedTokens.launch(logits, single, rows, sampler)
        beams: dict[DecodeRequest, list[int]] = {}
        if len(single) < len(sampled):
            for index in sampled:
                if stepped[index].request.search is not None:
                    beams.setdefault(stepped[index].request, []).append(index)
        found = _launch_beams(logits, beams, sampler.eos_ids)
        ended = record_event(logits.device)
        return SampledStep(plan, stepped, tokens, list(beams), found, ended)

    def shared_tokens(self) -> torch.Tensor | None:
        """Returns the token of each work item on the device; see `PlacedTokens.on_device`."""
        return self.tokens.on_device()

    def chosen(self) -> list[tuple[Stepped, Chosen | RequestError]]:
        """Returns the work items without beams that sampled a token, each with the token or an error.

        Waits for the device.
        """
        return self.tokens.chosen(self.stepped)

    def searched(self) -> dict[DecodeRequest, list[Candidate] | RequestError]:
        """Returns the most likely continuations of each beam search, or an error. Waits for the device."""
        return dict(zip(self.searches, self.beams.result(), strict=True)) if self.beams is not None else {}


def _sampling_row(sequence: DecodeSequence) -> SamplingRow:
    """Returns the sampling parameters and state for the sequence's next token, which the latest plan samples."""
    ahead, constraint = sequence.ahead_tokens - 1, sequence.constraint
    return SamplingRow(sequence.sampling, sequence.tokens, sequence.history, ahead, constraint)


def _launch_beams(
    logits: torch.Tensor, beams: dict[DecodeRequest, list[int]], eos_ids: Sequence[int]
) -> SampledBeams | None:
    """Launches the selection of candidates for beam searches; `beams`: the rows of `logits` of each request."""
    if not beams:
        return None
    steps = [
        BeamStep(request.sampling, request.sequences[0].tokens, [one.score for one in request.sequences])
        for request in beams
    ]
    index = upload([row for rows in beams.values() for row in rows], logits.device)
    return SampledBeams(logits[index], steps, eos_ids)
