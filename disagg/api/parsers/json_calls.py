"""Tool calls that are JSON objects with a name and arguments: Hermes and Qwen, Llama 3, Mistral, plain lists."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import ClassVar

from disagg.api.parsers.call_scanner import (
    MALFORMED,
    UNCLOSED,
    UNFINISHED,
    CallSyntax,
    Found,
    Marker,
    Read,
    Unfinished,
    call_of,
    calls_of,
    json_call,
    several,
)
from disagg.api.parsers.parts import Call
from disagg.api.parsers.texts import json_end, load_json
from disagg.core.grammars import text_literal

_SPACE = re.compile(r"\s*")


class HermesCalls(CallSyntax):
    """Calls of Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": .., "arguments": {..}}</tool_call>`."""

    markers: ClassVar[tuple[str, ...]] = ("<tool_call>",)
    visible: ClassVar[tuple[str, ...]] = ("<tool_call>", "</tool_call>")
    has_rules: ClassVar[bool] = True

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        call = json_call(name, "arguments", arguments)
        return f"{marker('<tool_call>')} SPACE {call} SPACE {marker('</tool_call>')}"

    def read(self, text: str, marker: str, last: bool) -> Read:
        start = _skip_space(text, len(marker))
        if start == len(text):
            return UNFINISHED
        if text[start] != "{":
            return MALFORMED
        end = json_end(text, start)
        if end is None:
            return UNCLOSED
        calls = _calls_in(text[start:end])
        if calls is None:
            return MALFORMED
        after, closing = _skip_space(text, end), "</tool_call>"
        rest = text[after : after + len(closing)]
        if rest == closing:
            return Found(calls, after + len(closing))
        if last or not closing.startswith(rest):  # some models omit the closing marker
            return Found(calls, end)
        return UNFINISHED


class LlamaCalls(CallSyntax):
    """Calls of Llama 3: `{"name": .., "parameters": {..}}`, joined by `;`, optionally after `<|python_tag|>`."""

    markers: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)
    first_markers: ClassVar[tuple[str, ...]] = ("{",)
    visible: ClassVar[tuple[str, ...]] = ("<|python_tag|>",)

    def read(self, text: str, marker: str, last: bool) -> Read:
        start = _skip_space(text, 0 if marker == "{" else len(marker))
        if start == len(text):
            return UNFINISHED
        values: list[str] = []
        last_end = start
        while text[start : start + 1] == "{":
            end = json_end(text, start)
            if end is None:
                return UNCLOSED
            values.append(text[start:end])
            last_end = end
            after = _skip_space(text, end)
            if after == len(text) and not last:
                return UNFINISHED
            if text[after : after + 1] != ";":
                break
            start = _skip_space(text, after + 1)
            if start == len(text) and not last:
                return UNFINISHED
        calls = [one for value in values if (one := _calls_in(value)) is not None]
        if not values or len(calls) < len(values):
            return MALFORMED
        return Found([call for one in calls for call in one], last_end)


class MistralCalls(CallSyntax):
    """Calls of Mistral: `[TOOL_CALLS]`, then a list of JSON objects, or a name and the arguments."""

    markers: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]",)
    visible: ClassVar[tuple[str, ...]] = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    short_ids: ClassVar[bool] = True
    has_rules: ClassVar[bool] = True

    _named = re.compile(r"\s*([\w.-]+)\s*(?:\[CALL_ID\]\w*\s*)?(?:\[ARGS\]\s*)?")

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        named = f"{text_literal(name)} ({marker('[CALL_ID]')} /[a-zA-Z0-9]{{9}}/)? {marker('[ARGS]')}? {arguments}"
        return f"{marker('[TOOL_CALLS]')} {named}"

    def calls(self, tools: Mapping[str, str], marker: Marker, *, parallel: bool) -> list[str]:
        items = [json_call(name, "arguments", value) for name, value in tools.items()]
        return [
            f'calls: nameds | {marker("[TOOL_CALLS]")} SPACE "[" items "]"',
            *several("named", self._rules(tools, marker), "SPACE", parallel=parallel),
            *several("item", items, '"," SPACE', parallel=parallel),
        ]

    def read(self, text: str, marker: str, last: bool) -> Read:
        start = _skip_space(text, len(marker))
        if text[start : start + 1] == "[":
            end = json_end(text, start)
            if end is None:
                return UNCLOSED
            calls = _calls_in(text[start:end])
            return Found(calls, end) if calls is not None else MALFORMED
        at = text.find("{", start)
        if at < 0:
            return Unfinished("[{")
        named, end = self._named.fullmatch(text, len(marker), at), json_end(text, at)
        if named is None:
            return MALFORMED
        if end is None:
            return UNCLOSED
        call = call_of(named[1], text[at:end])
        return Found([call], end) if call is not None else MALFORMED


class ListedCalls(CallSyntax):
    """Required calls (`tool_choice: required`): a JSON list of objects with `name` and `parameters`."""

    first_markers: ClassVar[tuple[str, ...]] = ("[",)

    def read(self, text: str, marker: str, last: bool) -> Read:
        end = json_end(text, 0)
        if end is None:
            return UNCLOSED
        calls = _calls_in(text[:end])
        return Found(calls, end) if calls is not None else MALFORMED


def _skip_space(text: str, start: int) -> int:
    found = _SPACE.match(text, start)
    assert found is not None, "the pattern matches an empty text"
    return found.end()


def _calls_in(text: str) -> list[Call] | None:
    """Returns the calls of a JSON object, or of a list of objects; None unless all objects are calls."""
    try:
        value = load_json(text)
    except ValueError:
        return None
    return calls_of(value if isinstance(value, list) else [value])
