"""Incremental detokenization, with stop strings."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, Protocol

from tokenizers.decoders import DecodeStream

Decode = Callable[[Sequence[int]], str]
"""Function that converts all tokens of an answer so far to text. With a `FastDecode` or an `IdDecode`, the cost
per new token is constant."""

REPLACEMENT = "\ufffd"


class FastDecode:
    """Decodes with a tokenizer of the `tokenizers` library: whole answers, or incrementally by `pieces`.

    The text contains no special tokens except the visible ones. Immutable: any number of answers may share a decoder.
    """

    def __init__(self, tokenizer: Any, visible: Collection[str] = ()) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`. `visible`: special tokens that are part of the text."""
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        special = {token: text.content for token, text in added.items() if text.special}
        self._special = frozenset(special)
        self._visible = {token: text for token, text in special.items() if text in visible}

    def __call__(self, tokens: Sequence[int]) -> str:
        """Returns the text of a whole answer."""
        if self._visible.keys().isdisjoint(tokens):
            return str(self._tokenizer.decode(list(tokens), skip_special_tokens=True))
        pieces = self.pieces()
        return pieces.push(tokens) + pieces.rest()

    def pieces(self) -> Pieces:
        """Returns the incremental decoder of one answer."""
        return _StreamedPieces(self, self._tokenizer, self._special, self._visible)


class IdDecode:
    """Decodes for a model without a tokenizer: the text of an answer is its token ids, such as ` 17 4 256`.

    Immutable: any number of answers may share it.
    """

    def __call__(self, tokens: Sequence[int]) -> str:
        """Returns the text of a whole answer."""
        return "".join(f" {token}" for token in tokens)

    def pieces(self) -> Pieces:
        """Returns the incremental decoder of one answer."""
        return _IdPieces(self)


def decode_with(tokenizer: Any, visible: Collection[str] = ()) -> Decode:
    """Returns the decoder of a transformers tokenizer, without special tokens and without clean-up of spaces.

    `visible`: special tokens that are part of the text.
    """
    if tokenizer.is_fast:
        return FastDecode(tokenizer.backend_tokenizer, visible)
    if not visible:
        return partial(tokenizer.decode, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    added = tokenizer.added_tokens_decoder.items()
    hidden = frozenset(token for token, text in added if text.special and text.content not in visible)

    def decode(tokens: Sequence[int]) -> str:
        shown = [token for token in tokens if token not in hidden]
        return str(tokenizer.decode(shown, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    return decode


class Pieces(Protocol):
    """Incremental decoder of one answer."""

    def push(self, tokens: Sequence[int]) -> str:
        """Adds tokens; returns the text that became final: later tokens do not change this text."""

    def rest(self) -> str:
        """Returns the text that was withheld, such as half a character; called at the end of the answer."""


class _StreamedPieces:
    """Decodes with `DecodeStream`, which decodes each new token with only a few neighbouring tokens.

    `DecodeStream` returns text that ends with a whole character, and cannot be flushed, so this class also keeps the
    pending tokens. Within a run of invalid bytes, each new token decodes the whole run again.
    """

    def __init__(
        self, decode: Decode, tokenizer: Any, special: frozenset[int], visible: Mapping[int, str]
    ) -> None:
        """`special`: all special tokens. `visible`: texts of the special tokens that are part of an answer's text."""
        self._decode, self._tokenizer = decode, tokenizer
        self._special, self._visible = special, visible
        self._stream = DecodeStream(skip_special_tokens=True)
        self._waiting: list[int] = []

    def push(self, tokens: Sequence[int]) -> str:
        if len(tokens) == 1:
            return self._piece(tokens[0])
        return "".join(map(self._piece, tokens))

    def rest(self) -> str:
        waiting, self._waiting = self._waiting, []
        return self._decode(waiting)

    def _piece(self, token: int) -> str:
        """Returns the text that is final after `token`.

        The stream gets no special tokens, because `DecodeStream` would keep special tokens pending and decode all of
        them for each token.
        """
        if token not in self._special:
            return self._step(token)
        text = self._visible.get(token)
        if text is None or not self._waiting:
            return text or ""
        self._stream = DecodeStream(skip_special_tokens=True)  # the old one would repeat the pending tokens
        return self.rest() + text

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
        # The invalid bytes would change text that was already returned: restart with the pending tokens.
        self._stream = DecodeStream(skip_special_tokens=True)
        return self._stream.step(self._tokenizer, self._waiting)


class _IdPieces:
    """Incremental decoder of an `IdDecode`. The text of each token is final immediately."""

    def __init__(self, decode: IdDecode) -> None:
        self._decode = decode

    def push(self, tokens: Sequence[int]) -> str:
        return self._decode(tokens)

    def rest(self) -> str:
        return ""


class _WholePieces:
    """Decodes the whole answer again for each token, with any `Decode`."""

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
    """Converts an answer's tokens to text incrementally, up to the first stop string.

    Text that may change (half a character) or may start a stop string is withheld. The output excludes the stop
    string and later text. A stop string that ends within the first `min_tokens` tokens is ordinary text.
    """

    def __init__(self, decode: Decode, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._pieces = decode.pieces() if isinstance(decode, FastDecode | IdDecode) else _WholePieces(decode)
        self._stop = tuple(s for s in stop if s)
        self._early_tokens = min_tokens
        """Number of further tokens in whose text stop strings are ignored."""
        self._early = 0
        """Number of characters at the start of `_held` in which stop strings are ignored."""
        self._held = ""
        self.stopped = False
        """Whether a stop string has occurred."""
        self.stop_text = ""
        """The stop string that occurred; empty without one."""

    def push(self, tokens: Sequence[int], last: bool = False) -> str:
        """Adds tokens; returns the text that became final, without a stop string. With `last`, nothing is
        withheld."""
        if self.stopped:
            return ""
        if not self._stop:
            text = self._pieces.push(tokens)
            return text + self._pieces.rest() if last else text
        early, late = tokens[: self._early_tokens], tokens[self._early_tokens :]
        self._early_tokens -= len(early)
        if early:
            self._held += self._pieces.push(early)
            self._early = len(self._held)
        self._held += self._pieces.push(late)
        if last:
            self._held += self._pieces.rest()
        found = [(at, s) for s in self._stop if (at := self._find(s)) >= 0]
        if found:
            cut, self.stop_text = min(found, key=itemgetter(0))
            self.stopped = True
            return self._emit(cut)
        return self._emit(len(self._held) - (0 if last else self._unsure()))

    def _find(self, stop: str) -> int:
        return self._held.find(stop, max(0, self._early - len(stop) + 1))

    def _unsure(self) -> int:
        """Returns the length of the longest suffix that may start a stop string."""
        lengths = (n for s in self._stop for n in range(1, len(s)) if self._held.endswith(s[:n]))
        return max(lengths, default=0)

    def _emit(self, count: int) -> str:
        piece, self._held = self._held[:count], self._held[count:]
        self._early = max(0, self._early - count)
        return piece
