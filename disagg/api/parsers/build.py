"""Builds the parser of one answer from the model's parsers and the request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from disagg.api.parsers.call_scanner import CallScanner
from disagg.api.parsers.forced_call import ForcedCall
from disagg.api.parsers.harmony import HarmonyParser
from disagg.api.parsers.json_calls import ListedCalls
from disagg.api.parsers.parts import AnswerParser, schemas_of
from disagg.api.parsers.registry import SYNTAXES, ParserNames
from disagg.api.parsers.thinking import THINK_MARKERS, PlainText, ThinkingParser


@dataclass(frozen=True)
class AnswerPlan:
    """The parts (reasoning, tool calls) that answers to a chat request can have, and the syntax of these parts."""

    names: ParserNames
    tools: Sequence[dict[str, Any]] = ()
    """Tools that the answer may call."""
    forced: str | None = None
    """Name of the tool that the answer must call; empty: any tools, in a list of calls; None: no call is required."""
    thinking: bool = False
    """Whether the prompt ends inside reasoning, which the answer continues."""
    parallel: bool = True
    """Whether an answer may have several calls; otherwise calls after the first one are dropped."""
    constrained: bool = False
    """Whether a grammar constrains the answer to content alone or calls alone."""

    @property
    def parses(self) -> bool:
        """Whether the answers need a parser."""
        return bool(self.tools) or self.names.reasoning != "none"

    @property
    def unruled(self) -> bool:
        """Whether the answer may have optional calls for which no grammar exists."""
        syntax = SYNTAXES.get(self.names.tools)
        return bool(self.tools) and self.forced is None and syntax is not None and not syntax.has_rules

    @property
    def short_ids(self) -> bool:
        """Whether the model family requires call ids of nine letters and digits."""
        syntax = SYNTAXES.get(self.names.tools)
        return syntax is not None and syntax.short_ids

    def parser(self) -> AnswerParser:
        """Returns the parser of one answer."""
        if self.names.harmony:
            return HarmonyParser(calls=bool(self.tools))
        markers = THINK_MARKERS.get(self.names.reasoning)
        rest = self._content_parser()
        return rest if markers is None else ThinkingParser(markers, rest, begun=self.thinking)

    def _content_parser(self) -> AnswerParser:
        schemas = schemas_of(self.tools)
        if self.forced:
            return ForcedCall(self.forced)
        if self.forced == "":
            return CallScanner(ListedCalls(schemas))
        syntax = SYNTAXES.get(self.names.tools) if self.tools else None
        return PlainText() if syntax is None else CallScanner(syntax(schemas), mixes=not self.constrained)


def opens_reasoning(names: ParserNames, prompt: str) -> bool:
    """Returns whether the text of a prompt ends with the marker that begins reasoning."""
    markers = THINK_MARKERS.get(names.reasoning)
    return markers is not None and prompt.rstrip().endswith(markers[0])
