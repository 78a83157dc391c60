"""From tokens to text, piece by piece, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
"""All tokens of an answer so far -> their text."""

REPLACEMENT = "\ufffd"


class TextStream:
    """Turns an answer's tokens into text as they come. `decode` turns a list of tokens into text.

    Text that may still change (half a character) or that may be the beginning of a stop string is held back.
    A stop string and what follows it never come out.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = ()) -> None:
        self._decode = decode
        self._stop = tuple(s for s in stop if s)
        self._tokens: list[int] = []
        self._out = 0
        self.text = ""
        """Everything that came out so far."""
        self.stopped = False
        """A stop string was seen."""

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Takes tokens in; returns the text that is now certain. With `last`, nothing is held back."""
        if self.stopped:
            return ""
        self._tokens.extend(tokens)
        whole = self._decode(self._tokens)
        cut = min((at for s in self._stop if (at := whole.find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._emit(whole[:cut])
        return self._emit(whole if last else whole[: len(whole) - self._unsure(whole)])

    def _unsure(self, whole: str) -> int:
        tail = len(whole) - len(whole.rstrip(REPLACEMENT))
        for stop in self._stop:
            longest = min(len(stop) - 1, len(whole))
            tail = max(tail, next((n for n in range(longest, 0, -1) if whole.endswith(stop[:n])), 0))
        return tail

    def _emit(self, certain: str) -> str:
        piece = certain[len(self.text) :]
        self.text += piece
        return piece
