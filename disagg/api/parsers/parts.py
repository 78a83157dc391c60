"""The contract of answer parsers, and the kinds of parts of an answer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class Reasoning(NamedTuple):
    """Text of the model's reasoning."""

    text: str


class Content(NamedTuple):
    """Text for the user."""

    text: str


class Call(NamedTuple):
    """A tool call. `arguments` is a JSON object, or empty if `Arguments` follow."""

    name: str
    arguments: str


class Arguments(NamedTuple):
    """Further text of the latest call's arguments."""

    text: str


Part = Reasoning | Content | Call | Arguments


class AnswerParser(ABC):
    """Divides one answer into parts, incrementally.

    The joined parts do not depend on how the text is split into `push` calls. A malformed or incomplete call is
    `Content`. Only markers, and white space next to calls and reasoning, are dropped. No text raises an error.
    """

    @abstractmethod
    def push(self, text: str) -> list[Part]:
        """Adds text; returns the parts that became final."""

    @abstractmethod
    def end(self) -> list[Part]:
        """Ends the answer; returns the parts of the remaining text."""


MakeParser = Callable[[], AnswerParser]


def parse_all(parser: AnswerParser, text: str) -> list[Part]:
    """Returns the parts of a whole answer, with adjacent texts of one kind joined."""
    return joined([*parser.push(text), *parser.end()])


def joined(parts: Sequence[Part]) -> list[Part]:
    """Returns `parts` with adjacent texts of one kind joined."""
    result: list[Part] = []
    for part in parts:
        last = result[-1] if result else None
        if last is not None and type(part) is type(last) and not isinstance(part, Call):
            result[-1] = type(part)(last[0] + part[0])
        else:
            result.append(part)
    return result


def schemas_of(tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the JSON schema of each tool's arguments, by the tool's name. `tools`: field of a chat request."""
    return {one["function"]["name"]: one["function"].get("parameters") or {} for one in tools}
