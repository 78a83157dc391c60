"""One step's sampling for a whole batch, on the device and without synchronization."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from disagg.core.types import SamplingParams
from disagg.kv.upload import upload
from disagg.model.sampling.adjustments import Adjustments
from disagg.model.sampling.masks import TokenMasks
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.sampling.sampled import LogprobRows, SampledTokens
from kernels.sampling.draw import DrawParams, draw, gap_of, likeliest_tokens, scale_of


class SamplingBatch:
    """Parameters and positions of a batch's rows on the device, built when the rows change.

    While the rows stay the same, a step only calls `sample` and `advance`. The batch keeps the rows' histories alive.
    Owned by the thread that samples.
    """

    def __init__(
        self, rows: Sequence[SamplingRow], eos_ids: Sequence[int], vocab: int, device: torch.device
    ) -> None:
        """Uploads the parameters without synchronization. Greedy rows without other parameters need no upload."""
        params = [row.params for row in rows]
        self._params, self._histories = params, [row.history for row in rows]
        self._positions = [row.position for row in rows]
        self._vocab, self._device = vocab, device
        self._adjustments = Adjustments(rows, eos_ids, vocab, device)
        draws = any(p.temperature > 0 for p in params)
        self._on_device: torch.Tensor | None = None
        """int64 `[n]`: the positions on the device; None if no kernel reads them."""
        if draws or self._adjustments.forbids_ending(self._positions):
            self._on_device = upload(self._positions, device)
        self._draw = _draw_params(params, self._on_device) if draws and self._on_device is not None else None
        self._logprobs = LogprobRows.of(params, vocab, device)

    def fits(self, rows: Sequence[SamplingRow], vocab: int, device: torch.device) -> bool:
        """Returns whether this batch can sample the next token of exactly these rows."""
        if len(rows) != len(self._params) or (vocab, device) != (self._vocab, self._device):
            return False
        return (
            all(map(is_, [row.params for row in rows], self._params))
            and all(map(is_, [row.history for row in rows], self._histories))
            and [row.position for row in rows] == self._positions
            and self._counts_all()
        )

    def _counts_all(self) -> bool:
        """Returns whether each history counts all tokens before its row's position."""
        pairs = zip(self._histories, self._positions, strict=True)
        return all(history.counted == position for history, position in pairs if history is not None)

    def adjusted(self, logits: torch.Tensor) -> torch.Tensor:
        """Returns the logits (float32 `[n, vocab]`) after penalties, biases and `min_tokens`.

        If any row changes, the result is a copy; otherwise it is `logits` itself.
        """
        barred = self._adjustments.forbids_ending(self._positions)
        return self._adjustments.apply(logits, self._on_device if barred else None)

    def sample(self, logits: torch.Tensor, masks: TokenMasks | None = None) -> SampledTokens:
        """Returns one token per row of `logits` (float32 `[n, vocab]`), which stay unchanged.

        `masks`: tokens that the rows' grammars allow; applied to the logits last, before a token is drawn.
        """
        if logits.shape != (len(self._params), self._vocab):
            raise ValueError(
                f"logits must be float32 [{len(self._params)}, {self._vocab}]; got {tuple(logits.shape)}"
            )
        adjusted = self.adjusted(logits)
        adjusted = adjusted.contiguous()
        if masks is not None:
            adjusted = adjusted.clone() if adjusted.data_ptr() == logits.data_ptr() else adjusted
            masks.apply(adjusted)
        tokens = likeliest_tokens(adjusted) if self._draw is None else draw(adjusted, self._draw)
        return SampledTokens(tokens, logits, self._logprobs, masks.errors if masks is not None else None)

    def advance(self, sampled: SampledTokens) -> None:
        """Prepares the next step of the same rows: counts their new tokens, and moves their positions by one."""
        self._adjustments.count(sampled.tokens)
        if self._on_device is not None:
            self._on_device += 1
        self._positions = [position + 1 for position in self._positions]

    def check(self) -> None:
        """Raises AssertionError if positions on host and device differ, or a token is not counted. Synchronizes."""
        assert self._on_device is None or self._on_device.tolist() == self._positions, "positions differ"
        assert self._counts_all(), "tokens are missing in the counts"


class Sampler:
    """Samples the steps of one engine. Parameters stay on the device while the same rows are sampled."""

    def __init__(self, eos_ids: Sequence[int]) -> None:
        self.eos_ids = eos_ids
        self.batch: SamplingBatch | None = None
        """The batch of the latest step's rows, ready for their next tokens."""

    def step(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> SampledTokens:
        """Launches the sampling of one token per row of `logits` (float32 `[len(rows), vocab]`, any device).

        Waits for the threads that compute the masks of constrained rows, but not for the device. The tokens are
        counted for penalties, so rows must not share a history. The next step of the same rows may be launched before
        the host has read the tokens; `SamplingRow.ahead_tokens` counts the unread tokens.
        """
        vocab, device = logits.shape[-1], logits.device
        if self.batch is None or not self.batch.fits(rows, vocab, device):
            self.batch = SamplingBatch(rows, self.eos_ids, vocab, device)
        sampled = self.batch.sample(logits, TokenMasks.of(rows, vocab, device))
        self.batch.advance(sampled)
        return sampled


def _draw_params(params: Sequence[SamplingParams], positions: torch.Tensor) -> DrawParams:
    """Returns the parameters for `draw`. Rows without a seed get random seeds from torch's default CPU generator."""
    n, device = len(params), positions.device
    random = torch.randint(-(2**63), 2**63 - 1, (n,)).tolist() if any(p.seed is None for p in params) else []
    seeds = [random[i] if p.seed is None else p.seed for i, p in enumerate(params)]
    top_k = [p.top_k for p in params]
    scales = [scale_of(p.temperature) for p in params]
    tails = [1.0 - p.top_p for p in params]
    gaps = [gap_of(p.min_p, p.temperature) for p in params]
    floats = upload([*scales, *tails, *gaps], device, torch.float32).view(3, n)
    whole = upload([*top_k, *seeds], device).view(2, n)
    return DrawParams(floats[0], floats[1], floats[2], whole[0], whole[1], positions)
