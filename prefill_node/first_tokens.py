"""Samples the first token of each sequence of a prompt, from the logits at the prompt's last position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import sampling_of
from disagg.core.types import RequestKey
from disagg.model.sampling.next_tokens import BeamStep, likeliest, next_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.sampled import Chosen
from prefill_node.request import First, PrefillRequest

ROWS = 32
"""Largest number of first tokens sampled in one call. A step can complete several prompts of many sequences each, and
sampling a token copies a row of logits several times, in memory that is not reserved."""


def first_tokens(
    logits: torch.Tensor, requests: Mapping[int, PrefillRequest], eos_ids: Sequence[int]
) -> dict[RequestKey, First | RequestError]:
    """Returns the first tokens of each request, or the request's error.

    `logits`: float32 `[rows, vocab]`; `requests`: requests by row of `logits`.
    """
    searches = {row: request for row, request in requests.items() if request.sampling.beams}
    others = {row: request for row, request in requests.items() if not request.sampling.beams}
    return _searches(logits, searches, eos_ids) | _others(logits, others, eos_ids)


def _others(
    logits: torch.Tensor, requests: Mapping[int, PrefillRequest], eos_ids: Sequence[int]
) -> dict[RequestKey, First | RequestError]:
    index, rows = [], []
    for row, request in requests.items():
        # One history for all sequences: they have no tokens yet, unless there is only one sequence.
        history = history_of(request.prompt, request.sampling)
        for number in range(request.sampling.n):
            index.append(row)
            own = sampling_of(request.sampling, number)
            rows.append(SamplingRow(own, request.answered, history, constraint=request.constraint))
    chosen: list[Chosen | RequestError] = []
    for at in range(0, len(rows), ROWS):
        part = slice(at, at + ROWS)
        chosen += next_tokens(logits[index[part]], rows[part], eos_ids)
    tokens = iter(chosen)
    return {r.key: _first([next(tokens) for _ in range(r.sampling.n)]) for r in requests.values()}


def _first(chosen: Sequence[Chosen | RequestError]) -> First | RequestError:
    good = [one for one in chosen if isinstance(one, Chosen)]
    wrong = [one for one in chosen if isinstance(one, RequestError)]
    if wrong:
        return wrong[0]
    return First([one.token for one in good], [], [one.logprobs for one in good if one.logprobs is not None])


def _searches(
    logits: torch.Tensor, requests: Mapping[int, PrefillRequest], eos_ids: Sequence[int]
) -> dict[RequestKey, First | RequestError]:
    if not requests:
        return {}
    steps = [BeamStep(request.sampling, (), [0.0]) for request in requests.values()]
    chosen = likeliest(logits[list(requests)], steps, eos_ids)
    return {
        request.key: best
        if isinstance(best, RequestError)
        else First([one.token for one in best], [one.score for one in best], [])
        for request, best in zip(requests.values(), chosen, strict=True)
    }
