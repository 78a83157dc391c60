"""Finds tool calls in the text of an answer; a `CallSyntax` for each model family defines how calls are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from disagg.api.parsers.parts import AnswerParser, Call, Content, Part
from disagg.api.parsers.schema_values import referred
from disagg.api.parsers.texts import Trimmer, dump_json, first_marker, load_json, unsure_characters
from disagg.core.grammars import schema_rule, text_literal


class Found(NamedTuple):
    """Result of `CallSyntax.read`: the calls in the text before position `end`. Without calls, this text is a marker
    to drop."""

    calls: list[Call]
    end: int


class Malformed(NamedTuple):
    """Result of `CallSyntax.read`: the marker begins no call and is therefore content."""


class Unfinished(NamedTuple):
    """Result of `CallSyntax.read`: the text is too short for another result."""

    needs: str = ""
    """Characters that can complete a call: the text is read again only after one of them has arrived; empty: after
    any character."""


Marker = Callable[[str], str]
"""Function that returns a marker as a term of the Lark dialect: a special token, or a text."""

Read = Found | Malformed | Unfinished
MALFORMED, UNFINISHED, UNCLOSED = Malformed(), Unfinished(), Unfinished("}]")


class CallSyntax(ABC):
    """Syntax of one family's tool calls."""

    markers: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call anywhere in an answer."""
    first_markers: ClassVar[tuple[str, ...]] = ()
    """Texts that begin a call only where no content precedes them."""
    visible: ClassVar[tuple[str, ...]] = ()
    """Markers that can be special tokens. The decoder must not remove these tokens from the text of an answer."""
    short_ids: ClassVar[bool] = False
    """Whether the family's chat templates need call ids of nine letters and digits."""
    has_rules: ClassVar[bool] = False
    """Whether `rule` and `calls` define a grammar of the calls, which can stand beside constrained content."""

    def __init__(self, schemas: dict[str, Any]) -> None:
        """`schemas`: JSON schema of each tool's arguments, by the tool's name."""
        self.schemas = schemas

    def parameter(self, tool: str, name: str) -> object:
        """Returns the JSON schema of a tool's parameter; None for a parameter without a schema."""
        schema = self.schemas.get(tool)
        properties = schema.get("properties") if isinstance(schema, dict) else None
        return referred(schema, properties.get(name)) if isinstance(properties, dict) else None

    def arguments(self, schema: dict[str, Any]) -> str:
        """Returns arguments that fit a JSON schema as an expression. Raises ValueError for a schema whose values the
        syntax cannot ensure."""
        return schema_rule(schema)

    def rule(self, name: str, arguments: str, marker: Marker) -> str:
        """Returns a call of the tool `name` as an expression of a Lark grammar; only if `has_rules`.

        `arguments`: expression of the arguments. `marker`: function that returns a marker as an expression. The rule
        `SPACE` is white space.
        """
        raise NotImplementedError(f"{type(self).__name__} has no rules")

    def calls(self, tools: Mapping[str, str], marker: Marker, *, parallel: bool) -> list[str]:
        """Returns the rule `calls` of all calls of an answer, and the rules that `calls` needs; only if `has_rules`.

        `tools`: expression of the arguments by the tool's name. `parallel`: whether several calls are allowed.
        """
        return several("call", self._rules(tools, marker), "SPACE", parallel=parallel)

    def _rules(self, tools: Mapping[str, str], marker: Marker) -> list[str]:
        return [self.rule(name, arguments, marker) for name, arguments in tools.items()]

    @abstractmethod
    def read(self, text: str, marker: str, last: bool) -> Read:
        """Reads the calls at the start of `text`, which begins with `marker`.

        Once a text has a result other than `Unfinished`, each longer text has the same result. `last`: whether the
        answer ends with `text`.
        """


class CallScanner(AnswerParser):
    """Divides an answer into content and calls."""

    def __init__(self, syntax: CallSyntax, *, mixes: bool = True) -> None:
        """`mixes`: whether calls may follow content. Otherwise the first characters decide: an answer that does not
        begin with a marker is content to its end, with all markers in it."""
        self._syntax, self._mixes = syntax, mixes
        self._text = ""
        """Text that is not yet divided into parts."""
        self._marker = ""
        """Marker at the start of `_text`; empty while no marker is found."""
        self._needs = ""
        """`Unfinished.needs` of the latest read. New text is read only if it contains one of these strings, so that a
        long call is not parsed again for each piece of text."""
        self._trimmer = Trimmer()

    def push(self, text: str) -> list[Part]:
        self._text += text
        if self._needs and not any(one in text for one in self._needs):
            return []
        return self._scan(last=False)

    def end(self) -> list[Part]:
        parts = self._scan(last=True)
        rest = self._trimmer.rest()
        return [*parts, Content(rest)] if rest else parts

    def _scan(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text and (self._marker or self._find(parts, last)):
            read = self._syntax.read(self._text, self._marker, last)
            self._needs = ""
            if isinstance(read, Unfinished) and not last:
                self._needs = read.needs
                break
            marker, self._marker = self._marker, ""
            if not isinstance(read, Found):
                self._content(parts, len(marker))
                continue
            parts += read.calls
            self._text = self._text[read.end :]
            if read.calls:
                self._trimmer.restart()
        return parts

    def _find(self, parts: list[Part], last: bool) -> bool:
        """Adds the content before the next marker to `parts`. Returns whether the text now begins with a marker."""
        syntax = self._syntax
        if not self._mixes:
            return self._find_first(parts, last)
        at, self._marker = first_marker(self._text, syntax.markers)
        if not self._trimmer.begun and syntax.first_markers:
            space = len(self._text) - len(self._text.lstrip())
            for one in syntax.first_markers:
                if self._text.startswith(one, space):
                    at, self._marker = space, one
        unsure = 0 if last else unsure_characters(self._text, syntax.markers)
        self._content(parts, at if at >= 0 else len(self._text) - unsure)
        return at >= 0

    def _find_first(self, parts: list[Part], last: bool) -> bool:
        """As `_find`, for answers of content or calls: a marker after content is content."""
        text, markers = self._text.lstrip(), self._syntax.markers
        space = len(self._text) - len(text)
        if self._trimmer.begun:
            self._content(parts, len(self._text))
            return False
        at, marker = first_marker(text, markers)
        if at == 0:
            self._content(parts, space)
            self._marker = marker
        elif last or not any(one.startswith(text) for one in markers):
            self._content(parts, len(self._text))
        return at == 0

    def _content(self, parts: list[Part], count: int) -> None:
        """Adds the first `count` characters to `parts` as content."""
        kept = self._trimmer.push(self._text[:count])
        self._text = self._text[count:]
        if kept:
            parts.append(Content(kept))


def several(name: str, kinds: Sequence[str], between: str, *, parallel: bool) -> list[str]:
    """Returns a rule `name` + `s`: one `name`, or with `parallel` more of them, with `between` as separator.

    Each `name` is one of the expressions `kinds`.
    """
    more = f"({between} {name})*" if parallel else ""
    numbered = [f"{name}_{number}" for number in range(len(kinds))]
    rules = [f"{one}: {kind}" for one, kind in zip(numbered, kinds, strict=True)]
    return [f"{name}s: {name} {more}", f"{name}: {' | '.join(numbered)}", *rules]


def json_call(name: str, key: str, arguments: str) -> str:
    """Returns the JSON object of a call as an expression. `key`: key of the arguments."""
    head = f'{{"name": {dump_json(name)}, "{key}": '
    return f'{text_literal(head)} {arguments} "}}"'


def call_of(name: object, arguments: object) -> Call | None:
    """Returns a call. Returns None unless `name` is a non-empty string and `arguments` is an object or the JSON text
    of an object."""
    if isinstance(arguments, str):
        try:
            arguments = load_json(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    try:
        dump_json(name)  # raises for a lone surrogate
        return Call(name, dump_json(arguments))
    except ValueError:
        return None


def calls_of(values: Sequence[object]) -> list[Call] | None:
    """Converts JSON objects with `name` and `arguments` (or `parameters`) to calls; None if any value is no call."""
    calls = []
    for value in values:
        if not isinstance(value, dict):
            return None
        arguments = value.get("arguments", value.get("parameters", {}))
        call = call_of(value.get("name"), arguments)
        if call is None:
            return None
        calls.append(call)
    return calls or None
