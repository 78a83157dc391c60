"""Token counts of one request's prompt and answer, on the device of the logits, for the request's penalties."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from disagg.core.errors import InvariantError
from disagg.core.types import SamplingParams
from disagg.kv.upload import upload
from disagg.model.sampling.constraints import AnswerConstraint


class TokenHistory:
    """Token counts of one request, int32 `[vocab]` in the layout of `kernels.sampling.penalties`.

    The counts are allocated at the first use and freed with the request. The counts depend only on prompt and answer,
    so any group can rebuild them. Owned by the sampling thread.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self._prompt = prompt
        self._counts: torch.Tensor | None = None
        self.counted = 0
        """Number of the answer's first tokens that the counts include."""

    def counts(self, answer: Sequence[int], position: int, vocab: int, device: torch.device) -> torch.Tensor:
        """Returns the counts, int32 `[vocab]`, that include exactly the first `position` tokens of the answer.

        `answer` may lack the last of these tokens if the device has already counted them. Does not synchronize.
        Raises InvariantError for a token that is neither in `answer` nor counted.
        """
        if self._counts is None or self.counted > position:
            self._counts = torch.zeros(vocab, dtype=torch.int32, device=device)
            self._counts.index_fill_(0, upload(self._prompt, device), 1)
            self.counted = 0
        if new := answer[self.counted : position]:
            tokens = upload(new, device)
            self._counts.scatter_add_(0, tokens, torch.full_like(tokens, 2, dtype=torch.int32))
            self.counted += len(new)
        if self.counted != position:
            raise InvariantError(
                f"{self.counted} of {position} tokens of an answer are counted for its penalties"
            )
        return self._counts


def history_of(prompt: Sequence[int], params: SamplingParams) -> TokenHistory | None:
    """Returns the token history that the penalties of `params` need; None without penalties."""
    if params.repetition_penalty != 1.0:
        return TokenHistory(prompt)
    return TokenHistory(()) if params.presence_penalty or params.frequency_penalty else None


class SamplingRow(msgspec.Struct, frozen=True):
    """One request for which the next token is to be sampled."""

    params: SamplingParams
    answer: Sequence[int]
    """Tokens of the answer that the host has read so far, without the prompt."""
    history: TokenHistory | None
    """Result of `history_of`; all steps of the answer use the same object."""
    ahead_tokens: int = 0
    """Number of tokens after `answer` that steps in flight are sampling; 0 with a constraint."""
    constraint: AnswerConstraint | None = None
    """Constraint by the answer's grammar; None without a grammar."""

    @property
    def position(self) -> int:
        """Index of the next token within the answer."""
        return len(self.answer) + self.ahead_tokens
