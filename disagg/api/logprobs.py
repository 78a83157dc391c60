"""The text and bytes of single tokens, for replies with log-probabilities."""

from __future__ import annotations

from collections.abc import Sequence

from disagg.api import replies as r
from disagg.api.model import ServedModel
from disagg.core.types import TokenLogprobs

LOWEST = -9999.0
"""Stands for a log-probability of minus infinity, which JSON lacks, as in vLLM."""


def finite(logprob: float) -> float:
    """Returns `logprob`, at least `LOWEST`."""
    return max(logprob, LOWEST)


class Speller:
    """Returns the text and the bytes of single tokens."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._texts: dict[int, str] = {}

    def text(self, token: int) -> str:
        """Returns the token's text, with U+FFFD for a partial character."""
        if token not in self._texts:
            self._texts[token] = self._model.spell([token])
        return self._texts[token]

    def prompt(self, scores: Sequence[TokenLogprobs], count: int) -> r.PromptLogprobs:
        """Returns entries of the field `prompt_logprobs`, with `count` most probable tokens at each position."""
        return [self._entry(one, count) for one in scores]

    def _entry(self, one: TokenLogprobs, count: int) -> dict[str, r.PromptLogprob]:
        entry = {str(one.token): r.PromptLogprob(finite(one.logprob), one.rank, self.text(one.token))}
        for rank, (token, logprob) in enumerate(one.top[:count], 1):
            entry.setdefault(str(token), r.PromptLogprob(finite(logprob), rank, self.text(token)))
        return entry

    def chat(self, logprobs: TokenLogprobs) -> r.ChatLogprob:
        """Returns one token's log-probabilities in the format of chat replies."""
        top = [r.TopLogprob(self.text(token), logprob, self._bytes(token)) for token, logprob in logprobs.top]
        return r.ChatLogprob(self.text(logprobs.token), logprobs.logprob, self._bytes(logprobs.token), top)

    def _bytes(self, token: int) -> list[int]:
        return list(self._model.token_bytes(token))
