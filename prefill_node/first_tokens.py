"""Samples the first token of each sequence of a prompt, from the logits at the prompt's last position."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from disagg.core.errors import RequestError
from disagg.core.sampling import sampling_of
from disagg.core.types import RequestKey
from disagg.kv.upload import upload
from disagg.model.sampling.next_tokens import BeamStep, SampledBeams, launch_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of
from disagg.model.sampling.sampled import Chosen, SampledTokens
from prefill_node.request import First, PrefillRequest

ROWS = 32
"""Largest number of first tokens sampled in one call. A step can complete several prompts of many sequences each, and
sampling a token copies a row of logits several times, in memory that is not reserved."""


class SampledFirstTokens:
    """The first tokens of the prompts that a step completes: sampled on the device, read by the host later."""

    def __init__(
        self, logits: torch.Tensor, requests: Mapping[int, PrefillRequest], eos_ids: Sequence[int]
    ) -> None:
        """Launches the sampling; the next step, which is launched after this call, may overwrite the logits.

        `logits`: float32 `[rows, vocab]`; `requests`: requests by row of `logits`.
        """
        self._searches = [request for request in requests.values() if request.sampling.beams]
        self._others = [request for request in requests.values() if not request.sampling.beams]
        rows = {id(request): row for row, request in requests.items()}
        self._beams = None
        if self._searches:
            steps = [BeamStep(request.sampling, (), [0.0]) for request in self._searches]
            picked = _rows(logits, [rows[id(request)] for request in self._searches])
            self._beams = SampledBeams(picked, steps, eos_ids)
        self._tokens = _launch(logits, [(rows[id(request)], request) for request in self._others], eos_ids)

    def result(self) -> dict[RequestKey, First | RequestError]:
        """Returns the first tokens of each request, or the request's error. Waits for the device."""
        found: dict[RequestKey, First | RequestError] = {}
        if self._beams is not None:
            for request, best in zip(self._searches, self._beams.result(), strict=True):
                found[request.key] = (
                    best
                    if isinstance(best, RequestError)
                    else First([one.token for one in best], [one.score for one in best], [])
                )
        tokens = iter([one for part in self._tokens for one in part.result()])
        for request in self._others:
            found[request.key] = _first([next(tokens) for _ in range(request.sampling.n)])
        return found


def _launch(
    logits: torch.Tensor, requests: Sequence[tuple[int, PrefillRequest]], eos_ids: Sequence[int]
) -> list[SampledTokens]:
    """Launches the sampling of `requests`, each with its row of `logits`: `n` tokens for each request, in order."""
    index, rows = [], []
    for row, request in requests:
        # One history for all sequences: they have no tokens yet, unless there is only one sequence.
        history = history_of(request.prompt, request.sampling)
        for number in range(request.sampling.n):
            index.append(row)
            own = sampling_of(request.sampling, number)
            rows.append(SamplingRow(own, request.answered, history, constraint=request.constraint))
    parts = [slice(at, at + ROWS) for at in range(0, len(rows), ROWS)]
    return [launch_tokens(_rows(logits, index[part]), rows[part], eos_ids) for part in parts]


def _rows(logits: torch.Tensor, index: Sequence[int]) -> torch.Tensor:
    """Returns a copy of rows of `logits`, without a synchronization."""
    return logits[upload(index, logits.device)]


def _first(chosen: Sequence[Chosen | RequestError]) -> First | RequestError:
    good = [one for one in chosen if isinstance(one, Chosen)]
    wrong = [one for one in chosen if isinstance(one, RequestError)]
    if wrong:
        return wrong[0]
    return First([one.token for one in good], [], [one.logprobs for one in good if one.logprobs is not None])
