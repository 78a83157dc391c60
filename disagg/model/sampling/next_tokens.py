"""Chooses the next token of each request from a step's logits; every engine uses these rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.sampling.beam_search import Candidate, candidates_wanted
from disagg.model.sampling.fixed_point import Top, log_softmax, top
from disagg.model.sampling.penalties import SamplingRow, adjust
from disagg.model.sampling.sampler import sample


class Chosen(NamedTuple):
    """One request's next token."""

    token: int
    logprobs: TokenLogprobs | None
    """None unless requested."""


def next_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]
) -> list[Chosen | RequestError]:
    """Returns one token per row of `logits` (float32 `[len(rows), vocab]`, any device), which stay unchanged.

    A row of bad logits yields a RequestError, as in `sample`. Synchronizes once, and once more for
    log-probabilities.
    """
    params = [row.params for row in rows]
    tokens = sample(adjust(logits, rows, eos_ids), params, [len(row.answer) for row in rows])
    wanted = {
        i: (token, p.logprobs)
        for i, (token, p) in enumerate(zip(tokens, params, strict=True))
        if isinstance(token, int) and p.logprobs is not None
    }
    logprobs = _logprobs(logits, wanted) if wanted else {}
    return [Chosen(t, logprobs.get(i)) if isinstance(t, int) else t for i, t in enumerate(tokens)]


class BeamStep(NamedTuple):
    """One beam search before its next step."""

    params: SamplingParams
    answer: Sequence[int]
    """Tokens of one beam so far; all beams have the same number."""
    scores: Sequence[float]
    """Score of each beam."""


def likeliest(
    logits: torch.Tensor, steps: Sequence[BeamStep], eos_ids: Sequence[int]
) -> list[list[Candidate] | RequestError]:
    """Returns the `candidates_wanted` likeliest continuations of each search, likeliest first.

    `logits`: float32 `[all beams, vocab]`, any device; unchanged. Bias and `min_tokens` change log-probabilities, as
    transformers' processors do. Bad logits yield an error for their search. Synchronizes once.
    """
    rows = [SamplingRow(step.params, step.answer, None) for step in steps for _ in step.scores]
    logprobs = adjust(log_softmax(logits), rows, eos_ids)
    scores = torch.tensor([score for step in steps for score in step.scores], device=logits.device)
    totals = torch.split(logprobs + scores[:, None], [len(step.scores) for step in steps])
    tops: list[Top] = []
    for step, total in zip(steps, totals, strict=True):
        wanted = candidates_wanted(step.params, ending_tokens(step.params, eos_ids))
        tops.append(top(total.flatten(), min(wanted, total.numel())))
    found = torch.cat(
        [torch.stack([top.values.double(), top.indices.double()]) for top in tops], dim=-1
    ).tolist()
    pairs = iter(zip(*found, strict=True))
    return [_candidates([next(pairs) for _ in top.values], logits.shape[-1]) for top in tops]


def _candidates(pairs: Sequence[tuple[float, float]], vocab: int) -> list[Candidate] | RequestError:
    if not math.isfinite(pairs[0][0]):  # NaN is above all others
        return RequestError("the model gave no finite logits; the request cannot go on")
    return [Candidate(score, *divmod(int(index), vocab)) for score, index in pairs]


def _logprobs(logits: torch.Tensor, wanted: dict[int, tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row; `wanted` maps rows to the chosen token and the number of likeliest tokens."""
    index = torch.tensor(list(wanted), device=logits.device)
    chosen = torch.tensor([token for token, _ in wanted.values()], device=logits.device)
    picked = logits[index].float()
    logprobs = log_softmax(picked)
    most = min(max(count for _, count in wanted.values()), logits.shape[-1])
    ids = torch.cat([chosen[:, None], top(picked, most).indices], dim=-1)
    found = torch.stack(
        [ids.double(), logprobs.gather(-1, ids).double()], dim=-1
    ).tolist()  # one wait for both
    reported = {}
    for (row, (_, count)), pairs in zip(wanted.items(), found, strict=True):
        (token, logprob), *likely = ((int(t), value) for t, value in pairs[: count + 1])
        reported[row] = TokenLogprobs(token, logprob, tuple(likely))
    return reported
