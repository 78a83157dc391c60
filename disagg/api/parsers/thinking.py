"""Parses reasoning between two markers, such as `<think>` and `</think>`."""

from __future__ import annotations

from disagg.api.parsers.parts import AnswerParser, Content, Part, Reasoning
from disagg.api.parsers.texts import Trimmer, unsure_characters
from disagg.core.config.api import ReasoningParserName

THINK_MARKERS: dict[ReasoningParserName, tuple[str, str]] = {
    "think": ("<think>", "</think>"),
    "magistral": ("[THINK]", "[/THINK]"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
    "kimi": ("◁think▷", "◁/think▷"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|>"),
}
"""Markers before and after the reasoning, by the parser's name. `think`: Qwen 3, DeepSeek R1, GLM 4.5 and others."""


class PlainText(AnswerParser):
    """Parser of an answer that is only content."""

    def push(self, text: str) -> list[Part]:
        return [Content(text)] if text else []

    def end(self) -> list[Part]:
        return []


class ThinkingParser(AnswerParser):
    """Parser of an answer that begins with reasoning; another parser reads the text after the reasoning.

    An answer that does not begin with the opening marker has no reasoning, unless the prompt ends with that marker.
    """

    def __init__(self, markers: tuple[str, str], rest: AnswerParser, *, begun: bool) -> None:
        """`rest`: parser of the text after the reasoning. `begun`: whether the prompt ends within the reasoning."""
        self._first, self._last = markers
        self._rest = rest
        self._state = "reasoning" if begun else "start"
        self._text = ""
        self._reasoning = Trimmer(drop_start=True)

    def push(self, text: str) -> list[Part]:
        if self._state == "rest":
            return self._rest.push(text)
        self._text += text
        return self._scan(last=False)

    def end(self) -> list[Part]:
        parts = self._scan(last=True) if self._state != "rest" else []
        return [*parts, *self._rest.end()]

    def _scan(self, last: bool) -> list[Part]:
        if self._state in ("start", "reasoning") and not self._skip_first(last):
            return []
        if self._state == "rest":
            return self._after("")
        at = self._text.find(self._last)
        unsure = 0 if last else unsure_characters(self._text, [self._last])
        count = at if at >= 0 else len(self._text) - unsure
        kept = self._reasoning.push(self._text[:count])
        self._text = self._text[count:]
        parts: list[Part] = [Reasoning(kept)] if kept else []
        return parts + self._after(self._last) if at >= 0 else parts

    def _skip_first(self, last: bool) -> bool:
        """Skips the opening marker, even if the prompt already ends with one. Returns False while the text is too
        short to decide."""
        begun, text = self._state == "reasoning", self._text.lstrip()
        if text.startswith(self._first):
            self._text = text[len(self._first) :]
            self._state = "thinking"
        elif self._first.startswith(text) and not last:
            return False
        else:
            self._state = "thinking" if begun else "rest"
        return True

    def _after(self, marker: str) -> list[Part]:
        """Passes the text after `marker` to the other parser."""
        text, self._text, self._state = self._text[len(marker) :], "", "rest"
        if not marker:
            return self._rest.push(text)
        self._rest = _WithoutStart(self._rest)
        return self._rest.push(text)


class _WithoutStart(AnswerParser):
    """Drops white space at the start of the text, and passes the rest to another parser."""

    def __init__(self, rest: AnswerParser) -> None:
        self._rest, self._begun = rest, False

    def push(self, text: str) -> list[Part]:
        if not self._begun:
            text = text.lstrip()
            self._begun = bool(text)
        return self._rest.push(text)

    def end(self) -> list[Part]:
        return self._rest.end()
