"""Tool calls of Kimi K2: special tokens around an id and the arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from disagg.api.parsers.call_scanner import Marker, call_of
from disagg.api.parsers.delimited_calls import DelimitedCalls
from disagg.api.parsers.parts import Call
from disagg.core.grammars import text_literal

_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"\s*(?:functions\.)?([\w.-]+):\d+\s*")


class KimiCalls(DelimitedCalls):
    """Calls such as `<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`."""

    finish, around = _END, _AROUND
    markers: ClassVar[tuple[str, ...]] = (_BEGIN, *_AROUND)
    visible: ClassVar[tuple[str, ...]] = (_BEGIN, _END, *_AROUND, _ARGUMENTS)

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        head = f"{text_literal(f'functions.{name}:')} /[0-9]{{1,3}}/"
        return f"{marker(_BEGIN)} {head} {marker(_ARGUMENTS)} {arguments} {marker(_END)}"

    def call(self, body: str) -> Call | None:
        head, _, arguments = body.partition(_ARGUMENTS)
        found = _ID.fullmatch(head)
        return call_of(found[1], arguments.strip()) if found is not None else None
