"""Parses answers of gpt-oss, which are messages in channels (OpenAI's harmony format)."""

from __future__ import annotations

import re
from typing import ClassVar

from disagg.api.parsers.call_scanner import call_of
from disagg.api.parsers.parts import AnswerParser, Content, Part, Reasoning
from disagg.api.parsers.texts import Trimmer, first_marker, unsure_characters

_START, _CHANNEL, _MESSAGE, _CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyParser(AnswerParser):
    """Parser of messages in channels.

    The channel `analysis` is reasoning; `final` and `commentary` are content. A message to a recipient is a call.
    """

    visible: ClassVar[tuple[str, ...]] = (_START, _CHANNEL, _MESSAGE, _CONSTRAIN, *_ENDS)

    def __init__(self, *, calls: bool) -> None:
        """`calls`: whether messages to recipients are calls; otherwise such messages are content."""
        self._calls = calls
        self._text = ""
        self._header: str | None = None
        """Header of the message whose text follows; None before a header."""
        self._trimmer = Trimmer()

    def push(self, text: str) -> list[Part]:
        self._text += text
        return self._scan(last=False)

    def end(self) -> list[Part]:
        return self._scan(last=True)

    def _scan(self, last: bool) -> list[Part]:
        parts: list[Part] = []
        while self._text:
            before = len(self._text)
            if self._header is None:
                self._read_outside(parts, last)
            else:
                self._read_message(parts, self._header, last)
            if len(self._text) == before:
                break
        if last:
            self._end_message(parts)
        return parts

    def _read_outside(self, parts: list[Part], last: bool) -> None:
        """Reads a header, or text outside of a message, which is content."""
        markers = (_START, _CHANNEL, _MESSAGE, *_ENDS)
        at, marker = first_marker(self._text, markers)
        if at != 0:
            count = (
                at if at > 0 else len(self._text) - (0 if last else unsure_characters(self._text, markers))
            )
            self._emit(parts, "", count)
        elif marker in _ENDS:
            self._text = self._text[len(marker) :]
        elif (end := self._text.find(_MESSAGE)) >= 0:
            self._header, self._text = self._text[:end], self._text[end + len(_MESSAGE) :]
            self._trimmer = Trimmer(drop_start=True)
        elif last:
            self._emit(parts, "", len(self._text))  # a header without a message

    def _read_message(self, parts: list[Part], header: str, last: bool) -> None:
        markers = (_START, _CHANNEL, *_ENDS)
        at, marker = first_marker(self._text, markers)
        if self._is_call(header):
            if at < 0 and not last:
                return
            count = at if at >= 0 else len(self._text)
            self._add_call(parts, header, self._text[:count])
            self._text = self._text[count:]
        else:
            unsure = 0 if last else unsure_characters(self._text, markers)
            self._emit(parts, header, at if at >= 0 else len(self._text) - unsure)
        if at >= 0:
            self._end_message(parts)
            self._text = self._text.removeprefix(marker) if marker in _ENDS else self._text

    def _end_message(self, parts: list[Part]) -> None:
        if self._header is None and (rest := self._trimmer.rest()):
            parts.append(Content(rest))
        self._header, self._trimmer = None, Trimmer(drop_start=True)

    def _add_call(self, parts: list[Part], header: str, text: str) -> None:
        found = _RECIPIENT.search(header)
        assert found is not None, "a call has a recipient"
        call = call_of(found[1].removeprefix("functions."), text.strip())
        parts.append(call if call is not None else Content(text))

    def _is_call(self, header: str) -> bool:
        return self._calls and _RECIPIENT.search(header) is not None

    def _emit(self, parts: list[Part], header: str, count: int) -> None:
        kept = self._trimmer.push(self._text[:count])
        self._text = self._text[count:]
        if kept:
            analysis = re.search(rf"{re.escape(_CHANNEL)}\s*analysis", header) is not None
            parts.append(Reasoning(kept) if analysis else Content(kept))
