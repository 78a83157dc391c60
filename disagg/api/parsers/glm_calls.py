"""Tool calls of GLM 4.5: a name, then a key and a value for each argument."""

from __future__ import annotations

import re
from typing import Any, ClassVar

from disagg.api.parsers.call_scanner import MALFORMED, Found, Marker, Read, Unfinished, call_of
from disagg.api.parsers.schema_values import typed_value
from disagg.api.parsers.tagged_values import TaggedCalls, Tags
from disagg.core.grammars import text_literal

_BEGIN, _END, _KEY = "<tool_call>", "</tool_call>", "<arg_key>"
_NAME = re.compile(r"\s*([\w.-]*)\s*")
_ARGUMENT = re.compile(
    r"<arg_key>([^<]*)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*(?=<arg_key>|</tool_call>)", re.DOTALL
)


class GlmCalls(TaggedCalls):
    """Calls such as `<tool_call>F<arg_key>P</arg_key><arg_value>value</arg_value></tool_call>`."""

    markers: ClassVar[tuple[str, ...]] = (_BEGIN,)
    visible: ClassVar[tuple[str, ...]] = (_BEGIN, _END)
    tags: ClassVar[Tags] = Tags("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>", "<")

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        return f"{marker(_BEGIN)} {text_literal(name)} SPACE {arguments} {marker(_END)}"

    def read(self, text: str, marker: str, last: bool) -> Read:
        named = _NAME.match(text, len(marker))
        assert named is not None, "the pattern matches an empty text"
        name, at = named[1], named.end()
        arguments: dict[str, Any] = {}
        while found := _ARGUMENT.match(text, at):
            key = found[1].strip()
            arguments[key] = typed_value(found[2], self.parameter(name, key))
            at = found.end()
        rest = text[at:]
        if name and rest.startswith(_END):
            call = call_of(name, arguments)
            return Found([call], at + len(_END)) if call is not None else MALFORMED
        is_open = rest.startswith(_KEY) or any(one.startswith(rest) for one in (_KEY, _END))
        return Unfinished(">") if is_open and (name or not rest) else MALFORMED
