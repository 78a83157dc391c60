"""Tool calls of DeepSeek V3, R1 and V3.1: special tokens around a name and its arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from disagg.api.parsers.call_scanner import MALFORMED, CallSyntax, Found, Read, Unfinished, call_of

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*([^\n]+?)\s*\n```json\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


class DeepSeekCalls(CallSyntax):
    """Calls of `function`, separator, name, and arguments in a code block (V3); or of name, separator, arguments."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, *_AROUND)
    visible: ClassVar[tuple[str, ...]] = (_BEGIN, _END, *_AROUND, _SEPARATOR)

    def read(self, text: str, marker: str, last: bool) -> Read:
        if marker in _AROUND:
            return Found([], len(marker))
        end = text.find(_END)
        if end < 0:
            return Unfinished(">")
        head, separator, body = text[len(marker) : end].partition(_SEPARATOR)
        name, arguments = head.strip(), body
        if fenced := _FENCED.fullmatch(body):
            name, arguments = fenced[1], fenced[2]
        call = call_of(name, arguments.strip()) if separator else None
        return Found([call], end + len(_END)) if call is not None else MALFORMED
