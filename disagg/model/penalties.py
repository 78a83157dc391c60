"""What changes logits before anything is drawn: penalties for repetition, a bias, no end before `min_tokens`.

Meaning of each: `repetition_penalty` as transformers' `RepetitionPenaltyLogitsProcessor`, `presence_penalty` and
`frequency_penalty` as OpenAI documents them (over the answer alone). The order among them is vLLM's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams


class TokenHistory:
    """Which tokens one request has had: over the whole vocabulary, on the device of the logits.

    5 bytes for each token of the vocabulary, taken when it is first used; freed with the request. Used by the thread
    that samples.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._in_prompt = self._counts = torch.empty(0)
        self._counted = 0

    def after(
        self, answer: Sequence[int], vocab: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bool `[vocab]`: prompt or answer has the token; float32 `[vocab]`: how often the answer has it.

        `answer` begins with what it was at the last call; only what is new is counted.
        """
        if not self._counts.numel():
            self._counts = torch.zeros(vocab, device=device)
            self._in_prompt = torch.zeros(vocab, dtype=torch.bool, device=device)
            self._in_prompt[torch.tensor(self._prompt, dtype=torch.long, device=device)] = True
            self._prompt = ()
        for token in answer[self._counted :]:
            self._counts[token].add_(1.0)
        self._counted = len(answer)
        return self._in_prompt | (self._counts > 0), self._counts


def history_of(prompt: Sequence[int], params: SamplingParams) -> TokenHistory | None:
    """What the penalties of `params` need; None when they are off."""
    if params.repetition_penalty != 1.0:
        return TokenHistory(prompt)
    return TokenHistory(()) if params.presence_penalty or params.frequency_penalty else None


class Row(NamedTuple):
    """One request whose next token is wanted."""

    params: SamplingParams
    answer: Sequence[int]
    """Its tokens so far, without the prompt."""
    history: TokenHistory | None
    """As `history_of` made it, the same one for the whole answer."""


def adjust(logits: torch.Tensor, rows: Sequence[Row], eos_ids: Sequence[int]) -> torch.Tensor:
    """Logits with penalties, bias and `min_tokens` applied: `logits` itself where no row asks, else a copy.

    `logits`: float32 `[len(rows), vocab]`, any device. Rows that ask for nothing keep their bits.
    """
    vocab = logits.shape[-1]
    penalised = [i for i, row in enumerate(rows) if row.history is not None]
    biased = [(i, token, bias) for i, row in enumerate(rows) for token, bias in row.params.logit_bias]
    barred = [(i, token) for i, row in enumerate(rows) for token in _barred(row, eos_ids) if token < vocab]
    if not (penalised or biased or barred):
        return logits
    logits = logits.clone()
    if penalised:
        index = torch.tensor(penalised, device=logits.device)
        logits[index] = _penalise(logits[index], [rows[i] for i in penalised])
    if biased:
        at, tokens, values = zip(*biased, strict=True)
        where = (torch.tensor(at, device=logits.device), torch.tensor(tokens, device=logits.device))
        logits.index_put_(
            where, torch.tensor(values, dtype=logits.dtype, device=logits.device), accumulate=True
        )
    if barred:
        row_of, token_of = torch.tensor(barred, device=logits.device).unbind(-1)
        logits[row_of, token_of] = float("-inf")
    return logits


def _barred(row: Row, eos_ids: Sequence[int]) -> tuple[int, ...]:
    return ending_tokens(row.params, eos_ids) if len(row.answer) < row.params.min_tokens else ()


def _penalise(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Logits `[n, vocab]` of rows that all have a history."""
    vocab, device = logits.shape[-1], logits.device
    histories = [row.history.after(row.answer, vocab, device) for row in rows if row.history is not None]
    seen, counts = torch.stack([s for s, _ in histories]), torch.stack([c for _, c in histories])
    columns = zip(*map(_penalties, rows), strict=True)
    repetition, frequency, presence = (torch.tensor(c, device=device)[:, None] for c in columns)
    repeated = torch.where(logits < 0, logits * repetition, logits / repetition)
    punished: torch.Tensor = (
        torch.where(seen, repeated, logits) - frequency * counts - presence * (counts > 0)
    )
    return punished


def _penalties(row: Row) -> tuple[float, float, float]:
    params = row.params
    return float(params.repetition_penalty), float(params.frequency_penalty), float(params.presence_penalty)
