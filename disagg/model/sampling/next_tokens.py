"""Chooses the next token of each request from a step's logits; every engine uses these rules."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.model.host_copy import HostCopy
from disagg.model.sampling.beam_search import Candidate, candidates_wanted
from disagg.model.sampling.fixed_point import Top, log_softmax, top
from disagg.model.sampling.penalties import SamplingRow, adjust
from disagg.model.sampling.sampler import sample_tokens, token_or_error


class Chosen(NamedTuple):
    """One request's next token."""

    token: int
    logprobs: TokenLogprobs | None
    """None unless requested."""


class SampledTokens:
    """The next tokens of a step's rows: on the device at once, on the host when the device has chosen them."""

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]) -> None:
        """Launches the choice of one token per row of `logits`: float32 `[len(rows), vocab]`, unchanged."""
        params = [row.params for row in rows]
        self.tokens = sample_tokens(adjust(logits, rows, eos_ids), params, [row.position for row in rows])
        """int64 `[len(rows)]` on the device of the logits; -1 for a row of bad logits."""
        self._host = HostCopy(self.tokens)
        self._wanted = {row: p.logprobs for row, p in enumerate(params) if p.logprobs is not None}
        self._logprobs = _launch_logprobs(logits, self.tokens, self._wanted) if self._wanted else None

    def result(self) -> list[Chosen | RequestError]:
        """Returns the token of each row, or an error for a row of bad logits. Waits for the device."""
        tokens = [token_or_error(token, row) for row, token in enumerate(self._host.values())]
        logprobs = _reported(self._logprobs.values(), self._wanted) if self._logprobs is not None else {}
        return [Chosen(t, logprobs.get(row)) if isinstance(t, int) else t for row, t in enumerate(tokens)]


def next_tokens(
    logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]
) -> list[Chosen | RequestError]:
    """Returns one token per row of `logits` (float32 `[len(rows), vocab]`, any device), which stay unchanged.

    A row of bad logits yields a RequestError. Waits for the device.
    """
    return SampledTokens(logits, rows, eos_ids).result()


class BeamStep(NamedTuple):
    """One beam search before its next step."""

    params: SamplingParams
    answer: Sequence[int]
    """Tokens of one beam so far; all beams have the same number."""
    scores: Sequence[float]
    """Score of each beam."""


class SampledBeams:
    """The likeliest continuations of beam searches; see `SampledTokens`."""

    def __init__(self, logits: torch.Tensor, steps: Sequence[BeamStep], eos_ids: Sequence[int]) -> None:
        """Launches the search in `logits`: float32 `[all beams, vocab]`, unchanged.

        Bias and `min_tokens` change log-probabilities, as transformers' processors do.
        """
        rows = [SamplingRow(step.params, step.answer, None) for step in steps for _ in step.scores]
        logprobs = adjust(log_softmax(logits), rows, eos_ids)
        scores = torch.tensor([score for step in steps for score in step.scores], device=logits.device)
        totals = torch.split(logprobs + scores[:, None], [len(step.scores) for step in steps])
        tops: list[Top] = []
        for step, total in zip(steps, totals, strict=True):
            wanted = candidates_wanted(step.params, ending_tokens(step.params, eos_ids))
            tops.append(top(total.flatten(), min(wanted, total.numel())))
        self._counts, self._vocab = [len(top.values) for top in tops], logits.shape[-1]
        self._host = HostCopy(
            torch.cat([torch.stack([top.values.double(), top.indices.double()]) for top in tops], dim=-1)
        )

    def result(self) -> list[list[Candidate] | RequestError]:
        """Returns the `candidates_wanted` likeliest continuations of each search, likeliest first.

        Bad logits yield an error for their search. Waits for the device.
        """
        pairs = iter(zip(*self._host.values(), strict=True))
        return [_candidates([next(pairs) for _ in range(count)], self._vocab) for count in self._counts]


def likeliest(
    logits: torch.Tensor, steps: Sequence[BeamStep], eos_ids: Sequence[int]
) -> list[list[Candidate] | RequestError]:
    """Returns the result of `SampledBeams` for float32 `[all beams, vocab]`. Waits for the device."""
    return SampledBeams(logits, steps, eos_ids).result()


def _candidates(pairs: Sequence[tuple[float, float]], vocab: int) -> list[Candidate] | RequestError:
    if not math.isfinite(pairs[0][0]):  # NaN is above all others
        return RequestError("the model gave no finite logits; the request cannot go on")
    return [Candidate(score, *divmod(int(index), vocab)) for score, index in pairs]


def _launch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, wanted: dict[int, int]) -> HostCopy:
    """float64 `[wanted, 1 + most, 2]`: id and log-probability of the chosen token, then of the likeliest ones.

    `wanted` maps rows to the number of likeliest tokens.
    """
    index = torch.tensor(list(wanted), device=logits.device)
    picked = logits[index].float()
    logprobs = log_softmax(picked)
    most = min(max(wanted.values()), logits.shape[-1])
    chosen = tokens[index].clamp(min=0)  # bad logits, whose log-probabilities are not reported
    ids = torch.cat([chosen[:, None], top(picked, most).indices], dim=-1)
    return HostCopy(torch.stack([ids.double(), logprobs.gather(-1, ids).double()], dim=-1))


def _reported(found: list[list[tuple[float, float]]], wanted: dict[int, int]) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row."""
    reported = {}
    for (row, count), pairs in zip(wanted.items(), found, strict=True):
        (token, logprob), *likely = ((int(t), value) for t, value in pairs[: count + 1])
        reported[row] = TokenLogprobs(token, logprob, tuple(likely))
    return reported
