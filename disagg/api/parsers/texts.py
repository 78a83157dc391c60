"""Helpers for text that arrives in pieces: incomplete markers, white space to drop, the end of JSON values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\]]|"', re.DOTALL)
_CLOSING = {"{": "}", "[": "]"}


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Returns position and text of the first marker; -1 without a marker. At equal positions, the longest marker
    wins."""
    found = [(at, -len(one), one) for one in markers if (at := text.find(one)) >= 0]
    at, _, marker = min(found, default=(-1, 0, ""))
    return at, marker


def unsure_characters(text: str, markers: Iterable[str]) -> int:
    """Returns the length of the longest suffix of `text` that may begin a marker."""
    return max((n for one in markers for n in range(1, len(one)) if text.endswith(one[:n])), default=0)


def json_end(text: str, start: int) -> int | None:
    """Returns the end position of the JSON object or array that begins at `start`; checks only brackets and strings.

    Returns None if the value is incomplete, and `start` if the brackets do not match.
    """
    open_brackets: list[str] = []
    for found in _TOKEN.finditer(text, start):
        token = found[0]
        if token == '"':
            return None  # a string without an end
        if token in _CLOSING:
            open_brackets.append(token)
        elif token in ("}", "]"):
            if not open_brackets or _CLOSING[open_brackets.pop()] != token:
                return start
            if not open_brackets:
                return found.end()
    return None


def load_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises ValueError, also for NaN, infinite numbers and deep nesting."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc


def dump_json(value: Any) -> str:
    """Returns the JSON text of a value. Raises ValueError for a value that JSON in UTF-8 cannot represent."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    text.encode()  # a lone surrogate raises UnicodeEncodeError, which is a ValueError
    return text


def _no_number(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


class Trimmer:
    """Withholds white space until other text follows, and may drop white space at the start."""

    def __init__(self, *, drop_start: bool = False) -> None:
        self._drop_start = drop_start
        self._held = ""
        self.begun = False
        """Whether text other than white space has passed since the start or `restart`."""

    def push(self, text: str) -> str:
        """Adds text; returns the text that became final."""
        text = self._held + text
        if self._drop_start and not self.begun:
            text = text.lstrip()
        kept = text.rstrip()
        self._held = text[len(kept) :]
        self.begun = self.begun or bool(kept)
        return kept

    def restart(self) -> None:
        """Drops withheld white space, and white space at the start of the text that follows."""
        self._held, self.begun, self._drop_start = "", False, True

    def rest(self) -> str:
        """Ends the text; returns the withheld white space. The result is empty if white space at the start is dropped
        and no other text followed."""
        held, self._held = self._held, ""
        return held if self.begun or not self._drop_start else ""
