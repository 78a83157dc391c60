"""Changes logits before sampling: repetition penalties, a bias, no end token before `min_tokens`.

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
    """The tokens of one request's prompt and answer, counted over the vocabulary, on the device of the logits.

    5 bytes per token of the vocabulary, allocated at the first use; freed with the request. Owned by the sampling
    thread.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._in_prompt = self._counts = torch.empty(0)
        self._counted = 0

    def after(
        self, answer: Sequence[int], vocab: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """bool `[vocab]`: prompt or answer has the token; float32 `[vocab]`: how often the answer has it.

        `answer` extends the answer of the previous call; only the new tokens are counted.
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
    """The history that the penalties of `params` need; None without penalties."""
    if params.repetition_penalty != 1.0:
        return TokenHistory(prompt)
    return TokenHistory(()) if params.presence_penalty or params.frequency_penalty else None


class SamplingRow(NamedTuple):
    """One request before its next token."""

    params: SamplingParams
    answer: Sequence[int]
    """Tokens so far, without the prompt."""
    history: TokenHistory | None
    """Result of `history_of`, one for the whole answer."""
    ahead_tokens: int = 0
    """Tokens behind `answer` that steps in flight sample; 0 for a row with a history."""

    @property
    def position(self) -> int:
        """Index of the next token within the answer."""
        return len(self.answer) + self.ahead_tokens


def adjust(logits: torch.Tensor, rows: Sequence[SamplingRow], eos_ids: Sequence[int]) -> torch.Tensor:
    """Logits with penalties, bias and `min_tokens` applied: a copy if any row changes.

    `logits`: float32 `[len(rows), vocab]`, any device. Rows without such parameters keep their bits.
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


def _barred(row: SamplingRow, eos_ids: Sequence[int]) -> tuple[int, ...]:
    return ending_tokens(row.params, eos_ids) if row.position < row.params.min_tokens else ()


def _penalise(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
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


def _penalties(row: SamplingRow) -> tuple[float, float, float]:
    params = row.params
    return float(params.repetition_penalty), float(params.frequency_penalty), float(params.presence_penalty)
