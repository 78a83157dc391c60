"""Chunked prefill: one rule for every scheduler, because a recurrent state depends on the chunk boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagg.core.types import Span
from disagg.model.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Chooses the number of a prompt's tokens that a step computes. Pure.

    Recurrent layers have one formula for several tokens and another for a single token after a state. In transformers
    the two can differ: Zamba 2 and Nemotron-H bound the time step in the first formula only. `generate()` uses the
    first for prompts and the second for answers. With `recurrent`, a chunk therefore has at least two tokens, and
    exceeds its room by one token where a single token would otherwise remain.
    """

    chunk_tokens: int
    """Token budget of one step; without `fixed`, a chunk takes the budget that other requests leave."""
    whole: bool = False
    """Each prompt is one chunk, even when longer than `chunk_tokens`."""
    recurrent: bool = False
    fixed: bool = False
    """Chunks end at multiples of `chunk_tokens` only, and a step computes a whole chunk or none. A prompt's chunks
    then do not depend on other requests."""

    @staticmethod
    def of(spec: ModelSpec, chunk_tokens: int, *, deterministic: bool = False) -> PromptChunks:
        """Returns the rule for a model whose `spec` a runner has completed; `deterministic`: see `ModelConfig`.

        Deterministic models with recurrent layers need fixed chunks; row-by-row operations do not depend on chunks.
        """
        recurrent = spec.state_tokens > 0
        return PromptChunks(chunk_tokens, spec.whole_prompts, recurrent, fixed=deterministic and recurrent)

    def take(self, start: int, stop: int, room_tokens: int, *, must: bool) -> int:
        """Returns how many tokens of a prompt's `start .. stop` fit in `room_tokens`; 0 postpones the chunk.

        `must`: the chunk is computed even beyond the room. A step without other work sets `must`, to make progress.
        """
        left = stop - start
        if left <= 0 or (room_tokens <= 0 and not must):
            return 0
        if self.whole:
            return left
        size = self._border(start) - start if self.fixed else max(room_tokens, 1)
        size = min(left, size)
        if self.recurrent and size == 1 < left:
            size = 2 if must else 0
        if self.recurrent and left - size == 1:
            size = left
        return size if must or not self.fixed or size <= room_tokens else 0

    def take_behind(self, start: int, prompt_tokens: int, stop: int, room_tokens: int, *, must: bool) -> int:
        """Returns `take` for a prompt of `prompt_tokens` tokens, followed by the answer so far, which ends at `stop`.

        With a recurrent state the answer is recomputed token by token, as in its first computation.
        """
        if not self.recurrent:
            return self.take(start, stop, room_tokens, must=must)
        if start >= prompt_tokens:
            return min(1, stop - start) if must or room_tokens > 0 else 0
        return self.take(start, prompt_tokens, room_tokens, must=must)

    def spans(self, tokens: int) -> Iterator[Span]:
        """Returns the chunks of a prompt of `tokens` tokens that shares no step with other requests."""
        start = 0
        while start < tokens:
            taken = self.take(start, tokens, self.chunk_tokens, must=True)
            yield Span(start, start + taken)
            start += taken

    @property
    def largest_tokens(self) -> int:
        """Most tokens of a chunk that is not a whole prompt."""
        return max(self.chunk_tokens, 2) + 1 if self.recurrent else self.chunk_tokens

    def _border(self, start: int) -> int:
        """Returns the end of a chunk that begins at `start`, in a prompt that is long enough."""
        size = max(self.chunk_tokens, 2) if self.recurrent else self.chunk_tokens
        return (start // size + 1) * size
