"""How prompts are cut into chunks: one rule for every scheduler, because a recurrent state depends on the cuts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagg.core.types import Span
from disagg.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Says how many tokens of a prompt a step computes. Pure.

    Recurrent layers have one formula for several tokens and one for a single token behind a state. In transformers
    the two are not always equal (Zamba 2 and Nemotron-H bound their time step in the first alone), and `generate()`
    uses the first for prompts and the second for answers. So with `recurrent` a prompt's token is never computed
    alone behind others: a chunk has two tokens at least, and one more than there is room for where one would be left.
    """

    chunk_tokens: int
    """Of one step, in all; without `fixed` a chunk is as long as the room that others leave of it."""
    whole: bool = False
    """A prompt is never cut, even when it is longer than `chunk_tokens`."""
    recurrent: bool = False
    fixed: bool = False
    """Prompts are cut at multiples of `chunk_tokens` only: a chunk is computed whole or not at all in a step, so
    that what a prompt is computed from does not depend on other requests."""

    @staticmethod
    def of(spec: ModelSpec, chunk_tokens: int, *, deterministic: bool = False) -> PromptChunks:
        """For a model whose `spec` a runner has completed; `deterministic`: see `ModelConfig`.

        Only a recurrent state has other bits for other chunks then: what is done by rows has not.
        """
        recurrent = spec.state_tokens > 0
        return PromptChunks(chunk_tokens, spec.whole_prompts, recurrent, fixed=deterministic and recurrent)

    def take(self, start: int, stop: int, room_tokens: int, *, must: bool) -> int:
        """Tokens of a prompt's `start .. stop` that a step with room for `room_tokens` more computes; 0: it waits.

        `must`: some are taken however little room there is. A step without any work must, so that prompts get on.
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

    def spans(self, tokens: int) -> Iterator[Span]:
        """The chunks of a prompt of `tokens` tokens that has all steps for itself."""
        start = 0
        while start < tokens:
            taken = self.take(start, tokens, self.chunk_tokens, must=True)
            yield Span(start, start + taken)
            start += taken

    @property
    def largest_tokens(self) -> int:
        """Of a chunk that is no whole prompt, at most."""
        return max(self.chunk_tokens, 2) + 1 if self.recurrent else self.chunk_tokens

    def _border(self, start: int) -> int:
        """Where a chunk that begins at `start` ends, in a prompt that is long enough."""
        size = max(self.chunk_tokens, 2) if self.recurrent else self.chunk_tokens
        return (start // size + 1) * size
