"""From tokens to text, piece by piece, and the stop strings in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

Decode = Callable[[Sequence[int]], str]
"""All tokens of an answer so far -> their text. A `FastDecode` is one that costs no more the longer the answer is."""

REPLACEMENT = "\ufffd"


class FastDecode:
    """Decodes with a tokenizer of the `tokenizers` library: whole answers, or by `pieces`.

    Special tokens are left out. Nothing of it changes after it was made: any number of answers may use it.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(token for token, text in added.items() if text.special)

    def __call__(self, tokens: Sequence[int]) -> str:
        """The whole answer's text."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))

    def pieces(self) -> Pieces:
        """For one answer."""
        return _StreamedPieces(self, self._tokenizer, self._special)


def decode_with(tokenizer: Any) -> Decode:
    """How a tokenizer of transformers turns tokens into text; without special tokens, spaces as they are."""
    if tokenizer.is_fast:
        return FastDecode(tokenizer.backend_tokenizer)
    return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Pieces(Protocol):
    """One answer's way from tokens to text."""

    def push(self, tokens: Sequence[int]) -> str:
        """Takes tokens in; returns the text that they make certain."""

    def rest(self) -> str:
        """What was held back, half a character say; the answer has ended."""


class _StreamedPieces:
    """A token costs what it takes to decode it with its neighbours.

    `DecodeStream` gives text out once it ends with a whole character. It has no end of its own, so the tokens that
    it still waits with are kept here too. A long run of bytes that are no text is decoded again for each of them.
    """

    def __init__(self, decode: Decode, tokenizer: Any, special: frozenset[int]) -> None:
        self._decode, self._tokenizer, self._special = decode, tokenizer, special
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        # The stream would keep special tokens until text comes, and decode them all again each time.
        return "".join(self._step(token) for token in tokens if token not in self._special)

    def rest(self) -> str:
        return self._decode(self._waiting)

    def _step(self, token: int) -> str:
        self._waiting.append(token)
        text = self._next(token)
        if text:
            self._waiting.clear()
        return text or ""

    def _next(self, token: int) -> str | None:
        try:
            return self._stream.step(self._tokenizer, token)
        except Exception as exc:
            if "Invalid prefix" not in str(exc):
                raise
        # Bytes that are no text change what stood before them, which is out: what waits begins anew.
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer, self._waiting)


class _WholePieces:
    """For any `Decode`: the whole answer is decoded again for each of its tokens."""

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._out = 0

    def push(self, tokens: Sequence[int]) -> str:
        self._tokens.extend(tokens)
        return self._upto(self._decode(self._tokens).rstrip(REPLACEMENT))

    def rest(self) -> str:
        return self._upto(self._decode(self._tokens))

    def _upto(self, certain: str) -> str:
        piece = certain[self._out :]
        self._out += len(piece)
        return piece


class TextStream:
    """Turns an answer's tokens into text as they come.

    Text that may still change (half a character) or that may be the beginning of a stop string is held back.
    A stop string and what follows it never come out. One that ends within the first `min_tokens` tokens is text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._pieces = decode.pieces() if isinstance(decode, FastDecode) else _WholePieces(decode)
        self._stop = tuple(s for s in stop if s)
        self._early_tokens = min_tokens
        """Tokens still to come in whose text no stop string counts."""
        self._early = 0
        """Characters of `_held` in which no stop string may end."""
        self._held = ""
        self.text = ""
        """Everything that came out so far."""
        self.stopped = False
        """A stop string was seen."""

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Takes tokens in; returns the text that is now certain. With `last`, nothing is held back."""
        if self.stopped:
            return ""
        early, late = tokens[: self._early_tokens], tokens[self._early_tokens :]
        self._early_tokens -= len(early)
        if early:
            self._held += self._pieces.push(early)
            self._early = len(self._held)
        self._held += self._pieces.push(late)
        if last:
            self._held += self._pieces.rest()
        cut = min((at for s in self._stop if (at := self._find(s)) >= 0), default=-1)
        if cut >= 0:
            self.stopped = True
            return self._emit(cut)
        return self._emit(len(self._held) - (0 if last else self._unsure()))

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._early - len(stop) + 1))

    def _unsure(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        lengths = (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n]))
        return max(lengths, default=0)

    def _emit(self, count: int) -> str:
        piece, self._held = self._held[:count], self._held[count:]
        self._early = max(0, self._early - count)
        self.text += piece
        return piece
