"""Tool calls of DeepSeek V3, R1 and V3.1: special tokens around a name and its arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from disagg.api.parsers.call_scanner import Marker, call_of
from disagg.api.parsers.delimited_calls import DelimitedCalls
from disagg.api.parsers.parts import Call
from disagg.core.grammars import text_literal

_BEGIN, _END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
_AROUND = ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
_SEPARATOR = "<｜tool▁sep｜>"
_FENCED = re.compile(r"\s*([^\n]+?)\s*\n```json\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


class DeepSeekCalls(DelimitedCalls):
    """Calls in two forms: `function`, separator, name, arguments in a code block (V3); or name, separator,
    arguments."""

    finish, around = _END, _AROUND
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, *_AROUND)
    visible: ClassVar[tuple[str, ...]] = (_BEGIN, _END, *_AROUND, _SEPARATOR)

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        separator = marker(_SEPARATOR)
        first, last = text_literal(name + "\n```json\n"), text_literal("\n```")
        fenced = f'"function" {separator} {first} {arguments} {last}'
        return f"{marker(_BEGIN)} ({fenced} | {text_literal(name)} {separator} {arguments}) {marker(_END)}"

    def call(self, body: str) -> Call | None:
        head, separator, arguments = body.partition(_SEPARATOR)
        name = head.strip()
        if fenced := _FENCED.fullmatch(arguments):
            name, arguments = fenced[1], fenced[2]
        return call_of(name, arguments.strip()) if separator else None
