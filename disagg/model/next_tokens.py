"""From a step's logits to the next token of each of its requests: the same rules wherever a token is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.beam_search import Candidate, candidates_wanted
from disagg.model.fixed_point import Top, log_softmax, top
from disagg.model.penalties import Row, adjust
from disagg.model.sampler import sample


class Chosen(NamedTuple):
    """One request's next token."""

    token: int
    logprobs: TokenLogprobs | None
    """None unless the request asked for them."""


def next_tokens(
    logits: torch.Tensor, rows: Sequence[Row], eos_ids: Sequence[int]
) -> list[Chosen | RequestError]:
    """One token per row of `logits` (float32 `[len(rows), vocab]`, any device), which are not changed.

    A row of bad logits yields an error in its place, as `sample` says. Waits for the device once, and once more if a
    row asks for log-probabilities.
    """
    params = [row.params for row in rows]
    tokens = sample(adjust(logits, rows, eos_ids), params, [len(row.answer) for row in rows])
    asked = {
        i: (token, p.logprobs)
        for i, (token, p) in enumerate(zip(tokens, params, strict=True))
        if isinstance(token, int) and p.logprobs is not None
    }
    told = _logprobs(logits, asked) if asked else {}
    return [Chosen(t, told.get(i)) if isinstance(t, int) else t for i, t in enumerate(tokens)]


class BeamStep(NamedTuple):
    """A beam search whose next step is wanted."""

    params: SamplingParams
    answer: Sequence[int]
    """Any beam's tokens so far: all have as many."""
    scores: Sequence[float]
    """Of each beam."""


def likeliest(
    logits: torch.Tensor, steps: Sequence[BeamStep], eos_ids: Sequence[int]
) -> list[list[Candidate] | RequestError]:
    """The likeliest continuations of each search, the likeliest first, as many as `candidates_wanted` says.

    `logits`: float32 `[all beams, vocab]`, any device; not changed. Bias and `min_tokens` change log-probabilities,
    as transformers' processors do. Bad logits yield an error for their search. Waits for the device once.
    """
    rows = [Row(step.params, step.answer, None) for step in steps for _ in step.scores]
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


def _logprobs(logits: torch.Tensor, asked: dict[int, tuple[int, int]]) -> dict[int, TokenLogprobs]:
    """By row; `asked` has each row's chosen token, and how many of the likeliest are wanted."""
    index = torch.tensor(list(asked), device=logits.device)
    chosen = torch.tensor([token for token, _ in asked.values()], device=logits.device)
    picked = logits[index].float()
    logprobs = log_softmax(picked)
    most = min(max(count for _, count in asked.values()), logits.shape[-1])
    ids = torch.cat([chosen[:, None], top(picked, most).indices], dim=-1)
    found = torch.stack(
        [ids.double(), logprobs.gather(-1, ids).double()], dim=-1
    ).tolist()  # one wait for both
    told = {}
    for (row, (_, count)), pairs in zip(asked.items(), found, strict=True):
        (token, logprob), *likely = ((int(t), value) for t, value in pairs[: count + 1])
        told[row] = TokenLogprobs(token, logprob, tuple(likely))
    return told
