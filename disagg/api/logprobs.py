"""The text and bytes of single tokens, for replies with log-probabilities."""

from __future__ import annotations

from disagg.api import replies as r
from disagg.api.model import ServedModel
from disagg.core.types import TokenLogprobs


class Speller:
    """Returns the text and the bytes of single tokens."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def text(self, token: int) -> str:
        """Returns the token's text, with U+FFFD for a partial character."""
        return self._model.spell([token])

    def chat(self, logprobs: TokenLogprobs) -> r.ChatLogprob:
        """Returns one token's log-probabilities in the format of chat replies."""
        top = [r.TopLogprob(self.text(token), logprob, self._bytes(token)) for token, logprob in logprobs.top]
        return r.ChatLogprob(self.text(logprobs.token), logprobs.logprob, self._bytes(logprobs.token), top)

    def _bytes(self, token: int) -> list[int]:
        return list(self._model.token_bytes(token))
