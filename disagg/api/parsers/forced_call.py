"""The answer to a request that names the tool to call: its text is the call's arguments."""

from __future__ import annotations

from disagg.api.parsers.parts import AnswerParser, Arguments, Call, Part


class ForcedCall(AnswerParser):
    """The whole text is the arguments of one call; a grammar ensures that it is a JSON object."""

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
