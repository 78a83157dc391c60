"""Chooses the next token of each request from a step's logits; every engine uses these rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams
from disagg.kv.upload import upload
from disagg.model.host_copy import HostCopy
from disagg.model.sampling.batch import SamplingBatch
from disagg.model.sampling.beam_search import Candidate, candidates_wanted
from disagg.model.sampling.fixed_point import Top, log_softmax, top
from disagg.model.sampling.masks import TokenMasks
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.sampled import Chosen, SampledTokens


def next_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]
) -> list[Chosen | RequestError]:
    """Returns one token per row of `logits` (float32 `[len(rows), vocab]`, any device), which stay unchanged.

    A row of bad logits (with NaN, or without a finite value) yields a RequestError and does not affect other rows.
    Rows may share a history. This function waits for the device; `launch_tokens` and `Sampler` do not.
    """
    return launch_tokens(logits, rows, eos_ids).result()


def launch_tokens(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]) -> SampledTokens:
    """Launches `next_tokens`; the step launched next may overwrite `logits`.

    `Sampler` also keeps parameters on the device between steps.
    """
    vocab, device = logits.shape[-1], logits.device
    masks = TokenMasks.of(rows, vocab, device)
    return SamplingBatch(rows, eos_ids, vocab, device).sample(logits, masks)


class BeamStep(NamedTuple):
    """The state of one beam search before its next step."""

    params: SamplingParams
    answer: Sequence[int]
    """Tokens of any one of the beams, which all have the same number of tokens."""
    scores: Sequence[float]
    """Score of each beam: sum of the log-probabilities of its tokens."""


class SampledBeams:
    """The likeliest continuations of beam searches; see `SampledTokens`."""

    def __init__(self, logits: torch.Tensor, steps: Sequence[BeamStep], eos_ids: Sequence[int]) -> None:
        """Launches the search in `logits`: float32 `[all beams, vocab]`, unchanged. Does not synchronize.

        Bias and `min_tokens` are applied to log-probabilities, not logits, like transformers' processors.
        """
        device = logits.device
        self._vocab = logits.shape[-1]
        rows = [SamplingRow(step.params, step.answer, None) for step in steps for _ in step.scores]
        logprobs = SamplingBatch(rows, eos_ids, self._vocab, device).adjusted(log_softmax(logits))
        scores = upload([score for step in steps for score in step.scores], device, torch.float32)
        totals = torch.split(logprobs + scores[:, None], [len(step.scores) for step in steps])
        tops: list[Top] = []
        for step, total in zip(steps, totals, strict=True):
            wanted = candidates_wanted(step.params, ending_tokens(step.params, eos_ids))
            tops.append(top(total.flatten(), min(wanted, total.numel())))
        self._counts = [len(top.values) for top in tops]
        self._host = HostCopy(
            torch.cat([torch.stack([top.values.double(), top.indices.double()]) for top in tops], dim=-1)
        )

    def result(self) -> list[list[Candidate] | RequestError]:
        """Returns the `candidates_wanted` likeliest continuations of each search, likeliest first.

        A search with bad logits yields a RequestError. Waits for the device.
        """
        pairs = iter(zip(*self._host.values(), strict=True))
        return [_candidates([next(pairs) for _ in range(count)], self._vocab) for count in self._counts]


def _candidates(pairs: Sequence[tuple[float, float]], vocab: int) -> list[Candidate] | RequestError:
    if not math.isfinite(pairs[0][0]):  # `top` sorts NaN first
        return RequestError("the model gave no finite logits; the request cannot continue")
    return [Candidate(score, *divmod(int(index), vocab)) for score, index in pairs]
