"""Tool calls of Kimi K2: special tokens around an id and the arguments."""

from __future__ import annotations

import re
from typing import ClassVar

from disagg.api.parsers.call_scanner import MALFORMED, CallSyntax, Found, Read, Unfinished, call_of

_BEGIN, _END = "<|tool_call_begin|>", "<|tool_call_end|>"
_AROUND = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
_ARGUMENTS = "<|tool_call_argument_begin|>"
_ID = re.compile(r"\s*(?:functions\.)?([\w.-]+):\d+\s*")


class KimiCalls(CallSyntax):
    """Calls such as `<|tool_call_begin|>functions.F:0<|tool_call_argument_begin|>{..}<|tool_call_end|>`."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN, *_AROUND)
    visible: ClassVar[tuple[str, ...]] = (_BEGIN, _END, *_AROUND, _ARGUMENTS)

    def read(self, text: str, marker: str, last: bool) -> Read:
        if marker in _AROUND:
            return Found([], len(marker))
        end = text.find(_END)
        if end < 0:
            return Unfinished(">")
        head, _, arguments = text[len(marker) : end].partition(_ARGUMENTS)
        found = _ID.fullmatch(head)
        call = call_of(found[1], arguments.strip()) if found is not None else None
        return Found([call], end + len(_END)) if call is not None else MALFORMED
