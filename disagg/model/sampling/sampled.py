"""The tokens and log-probabilities of a sampled step: available on the device at once, on the host after a copy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import torch

from disagg.core.errors import RequestError
from disagg.core.types import SamplingParams, TokenLogprobs
from disagg.kv.upload import upload
from disagg.model.host_copy import HostCopy
from disagg.model.sampling.fixed_point import log_softmax, top


class Chosen(msgspec.Struct, frozen=True):
    """One request's next token."""

    token: int
    logprobs: TokenLogprobs | None
    """Log-probabilities at this position; None unless requested."""


@dataclass(frozen=True)
class LogprobRows:
    """The rows of a batch whose log-probabilities are requested."""

    counts: dict[int, int]
    """Number of requested likeliest tokens, by row."""
    index: torch.Tensor
    """int64 `[m]`: the rows in `counts`, on the device."""
    most: int
    """Largest of `counts`, but at most the size of the vocabulary."""

    @classmethod
    def of(cls, params: Sequence[SamplingParams], vocab: int, device: torch.device) -> LogprobRows | None:
        """Returns the rows of `params` that request log-probabilities; None if no row does."""
        counts = {i: p.logprobs for i, p in enumerate(params) if p.logprobs is not None}
        if not counts:
            return None
        return cls(counts, upload([*counts], device), min(max(counts.values()), vocab))

    def launch(self, logits: torch.Tensor, tokens: torch.Tensor) -> HostCopy:
        """Starts the computation of the requested log-probabilities and their copy to the host.

        `logits`: the model's unchanged logits, float32 `[n, vocab]`. `tokens`: the chosen tokens, int64 `[n]`. The
        copy is float64 `[m, 1 + most, 2]`: id and log-probability of the chosen token, then of the likeliest tokens.
        """
        picked = logits.index_select(0, self.index)
        chosen = tokens.index_select(0, self.index).clamp_(
            min=0
        )  # rows of bad logits fail, so any id will do
        ids = torch.cat([chosen[:, None], top(picked, self.most).indices], dim=-1)
        return HostCopy(torch.stack([ids.double(), log_softmax(picked).gather(-1, ids).double()], dim=-1))

    def reported(self, found: Sequence[Sequence[tuple[float, float]]]) -> dict[int, TokenLogprobs]:
        """Returns the log-probabilities by row; `found` holds the values of the copy that `launch` returned."""
        reported = {}
        for (row, count), pairs in zip(self.counts.items(), found, strict=True):
            (token, logprob), *likely = ((int(t), value) for t, value in pairs[: count + 1])
            reported[row] = TokenLogprobs(token, logprob, tuple(likely))
        return reported


class SampledTokens:
    """The next tokens of a batch. Queued device work can use them at once; the host must wait for `result`."""

    def __init__(
        self,
        tokens: torch.Tensor,
        logits: torch.Tensor,
        wanted: LogprobRows | None,
        failed: Mapping[int, RequestError] | None = None,
    ) -> None:
        """Launches the copies to the host. `logits`: the model's unchanged logits, float32 `[n, vocab]`.

        `failed`: errors by row, for rows whose tokens are invalid.
        """
        self.tokens = tokens
        """Token of each row, int64 `[n]` on the device of the logits; -1 for a row of bad logits."""
        self._host = HostCopy(tokens)
        self._wanted, self._failed = wanted, failed or {}
        self._logprobs = wanted.launch(logits, tokens) if wanted is not None else None

    def result(self) -> list[Chosen | RequestError]:
        """Returns the token of each row, or the error of a failed row or of bad logits. Waits for the device."""
        logprobs: dict[int, TokenLogprobs] = {}
        tokens = self._host.values()
        if self._wanted is not None and self._logprobs is not None:
            logprobs = self._wanted.reported(self._logprobs.values())
        failed = self._failed
        return [
            Chosen(token, logprobs.get(row)) if token >= 0 and row not in failed else self._error(row)
            for row, token in enumerate(tokens)
        ]

    def _error(self, row: int) -> RequestError:
        return self._failed.get(row) or RequestError(
            f"the model gave no finite logits for row {row} of the batch; the request cannot continue"
        )
