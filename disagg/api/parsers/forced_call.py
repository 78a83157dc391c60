"""Parses answers to requests that name the tool to call: the text of the answer is the call's arguments."""

from __future__ import annotations

from disagg.api.parsers.parts import AnswerParser, Arguments, Call, Part


class ForcedCall(AnswerParser):
    """Parser of answers that consist of the arguments of one call; a grammar ensures that they are a JSON object."""

    def __init__(self, name: str) -> None:
        self._name, self._begun = name, False

    def push(self, text: str) -> list[Part]:
        parts = self._begin()
        return [*parts, Arguments(text)] if text else parts

    def end(self) -> list[Part]:
        return self._begin()

    def _begin(self) -> list[Part]:
        begun, self._begun = self._begun, True
        return [] if begun else [Call(self._name, "")]
