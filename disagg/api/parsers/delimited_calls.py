"""Tool calls between special tokens that begin and end each call (DeepSeek, Kimi)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from disagg.api.parsers.call_scanner import MALFORMED, CallSyntax, Found, Marker, Read, Unfinished, several
from disagg.api.parsers.parts import Call


class DelimitedCalls(CallSyntax):
    """Calls between a begin token and an end token. Further tokens around the list of calls are dropped."""

    finish: ClassVar[str]
    """End token of a call."""
    around: ClassVar[tuple[str, str]]
    """Tokens before and after the list of calls."""
    has_rules: ClassVar[bool] = True

    def calls(self, tools: Mapping[str, str], marker: Marker, *, parallel: bool) -> list[str]:
        first, last = map(marker, self.around)
        inner = several("inner", self._rules(tools, marker), "SPACE", parallel=parallel)
        return [f"calls: {first} SPACE inners SPACE {last}", *inner]

    def read(self, text: str, marker: str, last: bool) -> Read:
        if marker in self.around:
            return Found([], len(marker))
        end = text.find(self.finish)
        if end < 0:
            return Unfinished(">")
        call = self.call(text[len(marker) : end])
        return Found([call], end + len(self.finish)) if call is not None else MALFORMED

    @abstractmethod
    def call(self, body: str) -> Call | None:
        """Returns the call whose text between the two tokens is `body`; None if `body` is no call."""
