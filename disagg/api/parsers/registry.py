"""Names of the parsers, and their automatic choice from the checkpoint's chat template."""

from __future__ import annotations

from dataclasses import dataclass, replace

from disagg.api.parsers.call_scanner import CallSyntax
from disagg.api.parsers.deepseek_calls import DeepSeekCalls
from disagg.api.parsers.glm_calls import GlmCalls
from disagg.api.parsers.harmony import HarmonyParser
from disagg.api.parsers.json_calls import HermesCalls, LlamaCalls, MistralCalls
from disagg.api.parsers.kimi_calls import KimiCalls
from disagg.api.parsers.thinking import THINK_MARKERS
from disagg.api.parsers.xml_calls import QwenCoderCalls
from disagg.core.config.api import ReasoningParserName, ToolParserName

SYNTAXES: dict[ToolParserName, type[CallSyntax]] = {
    "hermes": HermesCalls,
    "qwen3_coder": QwenCoderCalls,
    "glm45": GlmCalls,
    "llama3_json": LlamaCalls,
    "mistral": MistralCalls,
    "deepseek": DeepSeekCalls,
    "kimi_k2": KimiCalls,
}
"""Syntax of tool calls by parser name. `harmony` is absent, because `HarmonyParser` reads whole answers."""

_TOOL_SIGNS: tuple[tuple[str, ToolParserName], ...] = (
    ("<|channel|>", "harmony"),
    ("<function=", "qwen3_coder"),
    ("<arg_key>", "glm45"),
    ("<tool_call>", "hermes"),
    ("[TOOL_CALLS]", "mistral"),
    ("<｜tool▁call▁begin｜>", "deepseek"),
    ("<|tool_call_begin|>", "kimi_k2"),
    ("<|python_tag|>", "llama3_json"),
    ("Environment: ipython", "llama3_json"),
)
"""Texts in chat templates, each with the parser that the text indicates. The first text found decides."""


@dataclass(frozen=True)
class ParserNames:
    """The parsers of a served model."""

    tools: ToolParserName = "none"
    reasoning: ReasoningParserName = "none"

    @property
    def harmony(self) -> bool:
        """Whether one parser separates reasoning, content and calls."""
        return "harmony" in (self.tools, self.reasoning)

    @property
    def visible(self) -> frozenset[str]:
        """Special tokens that the decoder must keep in the text of answers, for the parsers."""
        if self.harmony:
            return frozenset(HarmonyParser.visible)
        syntax = SYNTAXES.get(self.tools)
        texts = syntax.visible if syntax is not None else ()
        return frozenset((*texts, *THINK_MARKERS.get(self.reasoning, ())))

    def chosen(self, template: str) -> ParserNames:
        """Returns the names, with each `auto` replaced by the parser that the template indicates, or by `none`."""
        tools, reasoning = self.tools, self.reasoning
        if tools == "auto":
            tools = next((name for sign, name in _TOOL_SIGNS if sign in template), "none")
        if reasoning == "auto":
            reasoning = _reasoning_in(template)
        return replace(self, tools=tools, reasoning=reasoning)


def _reasoning_in(template: str) -> ReasoningParserName:
    if "<|channel|>" in template:
        return "harmony"
    for name, (_, last) in THINK_MARKERS.items():
        if last in template:
            return name
    return "none"
