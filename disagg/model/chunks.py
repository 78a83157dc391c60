"""Chunked prefill: one rule for all schedulers, because a recurrent state depends on the chunk boundaries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from disagg.core.types import Span
from disagg.model.spec.model_spec import ModelSpec


@dataclass(frozen=True, slots=True)
class PromptChunks:
    """Chooses how many tokens of a prompt a step computes. Pure.

    Recurrent layers have one formula for several tokens and another for a single token after a state. In transformers
    the two can differ: Zamba 2 and Nemotron-H bound the time step in the first formula only. `generate()` uses the
    first formula for prompts and the second one for answers. With `recurrent`, a chunk therefore has at least two
    tokens, and is extended by one token if a single token would remain after it. Registered recurrent modules
    (`disagg.model.recurrent.registry`) choose the formula by position, so they need no such rule (`single`).
    """

    chunk_tokens: int
    """Token budget of one step. Unless `fixed`, a chunk uses the part of the budget that other requests leave."""
    whole: bool = False
    """Whether each prompt is one chunk, even if it is longer than `chunk_tokens`."""
    recurrent: bool = False
    fixed: bool = False
    """Whether chunks end only at multiples of `chunk_tokens`. A step then computes a whole chunk or none, and a
    prompt's chunks then do not depend on other requests."""
    single: bool = False
    """Whether a chunk may have one token even with `recurrent`."""

    @staticmethod
    def of(spec: ModelSpec, chunk_tokens: int, *, deterministic: bool = False) -> PromptChunks:
        """Returns the rule for a model whose `spec` a runner has completed; `deterministic`: see `ModelConfig`.

        With `deterministic`, models with recurrent layers need fixed chunks. Other models do not: their row-by-row
        operations give the same bits for any chunks.
        """
        recurrent = spec.has_state
        fixed = deterministic and recurrent
        return PromptChunks(chunk_tokens, spec.whole_prompts, recurrent, fixed, single=spec.any_chunks)

    def take(self, start: int, stop: int, room_tokens: int, *, must: bool) -> int:
        """Returns how many tokens of a prompt's `start .. stop` fit in `room_tokens`; 0 postpones the chunk.

        With `must`, the result may exceed `room_tokens` and is not 0. A step without other work sets `must`, to make
        progress.
        """
        left = stop - start
        if left <= 0 or (room_tokens <= 0 and not must):
            return 0
        if self.whole:
            return left
        size = self._border(start) - start if self.fixed else max(room_tokens, 1)
        size = min(left, size)
        if self._pairs and size == 1 < left:
            size = 2 if must else 0
        if self._pairs and left - size == 1:
            size = left
        return size if must or not self.fixed or size <= room_tokens else 0

    def take_behind(self, start: int, prompt_tokens: int, stop: int, room_tokens: int, *, must: bool) -> int:
        """Returns the size of the next chunk of a recomputed request: `prompt_tokens`, then its answer up to `stop`.

        The other parameters and the result are those of `take`. With recurrent layers, the answer is recomputed token
        by token, in the same way as in its first generation.
        """
        if not self.recurrent:
            return self.take(start, stop, room_tokens, must=must)
        if start >= prompt_tokens:
            return min(1, stop - start) if must or room_tokens > 0 else 0
        return self.take(start, prompt_tokens, room_tokens, must=must)

    @property
    def anywhere(self) -> bool:
        """Whether a chunk may end at any position of a prompt."""
        return not (self.whole or self.fixed or self._pairs)

    def may_end(self, stop: int) -> bool:
        """Returns whether a chunk may end at `stop`, for any start of the chunk and any length of the prompt."""
        return not (self.whole or self._pairs) and (not self.fixed or self._border(stop - 1) == stop)

    def settled_tokens(self, tokens: int) -> int:
        """Returns how many of a prompt's first `tokens` tokens may be cached for longer prompts.

        With `fixed`, these are the tokens in chunks that are the same for every longer prompt with this prefix.
        """
        return self._border(tokens) - self._size if self.fixed else tokens

    def spans(self, tokens: int) -> Iterator[Span]:
        """Yields the chunks of a prompt of `tokens` tokens, if no other request shares its steps."""
        start = 0
        while start < tokens:
            taken = self.take(start, tokens, self.chunk_tokens, must=True)
            yield Span(start, start + taken)
            start += taken

    @property
    def largest_tokens(self) -> int:
        """Largest number of tokens in a chunk, unless chunks are whole prompts."""
        return max(self.chunk_tokens, 2) + 1 if self._pairs else self.chunk_tokens

    @property
    def _pairs(self) -> bool:
        """Whether each chunk of a prompt of two or more tokens must have at least two tokens."""
        return self.recurrent and not self.single

    def _border(self, start: int) -> int:
        """Returns where a fixed chunk that begins at `start` ends, if the prompt is long enough."""
        return (start // self._size + 1) * self._size

    @property
    def _size(self) -> int:
        """Number of tokens of a fixed chunk."""
        return max(self.chunk_tokens, 2) if self._pairs else self.chunk_tokens
