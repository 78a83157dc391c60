"""Tool calls in the XML of Qwen 3 Coder: `<function=NAME>` with a `<parameter=NAME>` for each argument."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from disagg.api.parsers.call_scanner import (
    MALFORMED,
    UNFINISHED,
    Found,
    Marker,
    Read,
    Unfinished,
    call_of,
)
from disagg.api.parsers.schema_values import typed_value
from disagg.api.parsers.tagged_values import TaggedCalls, Tags
from disagg.core.grammars import text_literal

_END = "</function>"
_HEAD = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>\s*")
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|</function>)", re.DOTALL)
_BEGINNINGS = ("<tool_call>", "<function=")


class QwenCoderCalls(TaggedCalls):
    """Calls such as `<tool_call><function=F><parameter=P>value</parameter></function></tool_call>`.

    The schema of the tool's parameter determines whether a value is a text or JSON.
    """

    markers: ClassVar[tuple[str, ...]] = _BEGINNINGS
    visible: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    tags: ClassVar[Tags] = Tags("<parameter=", ">\n", "\n</parameter>", ">\n")

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        head = f"{marker('<tool_call>')} SPACE {text_literal(f'<function={name}>')} SPACE"
        return f"{head} {arguments} {text_literal(_END)} SPACE {marker('</tool_call>')}"

    def read(self, text: str, marker: str, last: bool) -> Read:
        body = text[len(marker) :].lstrip() if marker == "<tool_call>" else text
        if not body.startswith("<function="):
            return UNFINISHED if "<function=".startswith(body) else MALFORMED
        head = _HEAD.match(text)
        if head is None:
            return MALFORMED if "\n" in body or ">" in body else UNFINISHED
        arguments, at = self._arguments(text, head.end(), head[1].strip())
        if not text.startswith(_END, at):
            return Unfinished(">") if _is_open(text[at:]) else MALFORMED
        call = call_of(head[1].strip(), arguments)
        if call is None:
            return MALFORMED
        return self._found(text, at + len(_END), call, last, closes=marker == "<tool_call>")

    def _found(self, text: str, end: int, call: Any, last: bool, *, closes: bool) -> Read:
        if not closes:
            return Found([call], end)
        closing = "</tool_call>"
        after = end + len(text[end:]) - len(text[end:].lstrip())
        rest = text[after : after + len(closing)]
        if rest == closing:
            return Found([call], after + len(closing))
        return Found([call], end) if last or not closing.startswith(rest) else UNFINISHED

    def _arguments(self, text: str, at: int, name: str) -> tuple[dict[str, Any], int]:
        """Returns the complete arguments from position `at` on, and the end position of the last one."""
        arguments: dict[str, Any] = {}
        while found := _PARAMETER.match(text, at):
            key = found[1].strip()
            arguments[key] = typed_value(
                found[2].removeprefix("\n").removesuffix("\n"), self.parameter(name, key)
            )
            at = found.end()
        return arguments, at


def _is_open(text: str) -> bool:
    """Returns whether `text`, after complete parameters, may still become a parameter or the end of the function."""
    return any(one.startswith(text) or text.startswith(one) for one in ("<parameter=", _END))
