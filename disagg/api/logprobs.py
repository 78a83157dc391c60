"""How single tokens are spelled where their log-probabilities are reported."""

from __future__ import annotations

from disagg.api import replies as r
from disagg.api.model import ServedModel
from disagg.core.types import TokenLogprobs


class Speller:
    """Text and bytes of one token at a time."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model

    def text(self, token: int) -> str:
        """The token's text; U+FFFD where it is half a character."""
        return self._model.spell([token])

    def chat(self, logprobs: TokenLogprobs) -> r.ChatLogprob:
        """One token in the shape of chat answers."""
        top = [r.TopLogprob(self.text(token), logprob, self._bytes(token)) for token, logprob in logprobs.top]
        return r.ChatLogprob(self.text(logprobs.token), logprobs.logprob, self._bytes(logprobs.token), top)

    def _bytes(self, token: int) -> list[int]:
        return list(self._model.token_bytes(token))
