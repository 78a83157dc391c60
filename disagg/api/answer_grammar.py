"""Grammars of chat answers that must call a tool, or that reason before a constrained text.

Reasoning is not constrained; the grammar applies to the text after the reasoning.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.thinking import THINK_MARKERS
from disagg.api.structured import arguments_schema, schema_rule
from disagg.core.grammars import followed_by, lark_grammar, schema_grammar, text_literal

Marker = Callable[[str], str]
"""Function that returns a marker as a term of the Lark dialect: a special token, or a text."""

_ANY = r"ANY: /(?s:.*)/"
_SPACE = r"SPACE: /[ \n]{0,8}/"


def answer_grammar(plan: AnswerPlan, grammar: str, marker: Marker) -> str:
    """Returns the grammar of a whole answer whose content, or calls, follow `grammar`."""
    if plan.names.harmony:
        return _harmony(plan, grammar, marker)
    markers = THINK_MARKERS.get(plan.names.reasoning)
    if markers is None:
        return grammar
    first, last = map(marker, markers)
    thinks = "think" if plan.thinking else f"({first} think)?"
    return followed_by("\n".join((f"start: {thinks} @body", *_until(last))), grammar)


def calls_grammar(plan: AnswerPlan) -> str:
    """Returns the grammar of calls without a family's markers: arguments of the forced tool, or a list of calls."""
    if plan.forced:
        [tool] = [one for one in plan.tools if one["function"]["name"] == plan.forced]
        return schema_grammar(arguments_schema(tool))
    more = '("," SPACE call)*' if plan.parallel else ""
    rules = [f'start: "[" call {more} "]"', "call: " + _either("call", plan.tools), _SPACE]
    for number, tool in enumerate(plan.tools):
        name = text_literal('{"name": ' + text_literal(tool["function"]["name"]) + ', "parameters": ')
        rules.append(f'call_{number}: {name} {schema_rule(arguments_schema(tool))} "}}"')
    return lark_grammar("\n".join(rules))


def _until(last: str) -> tuple[str, ...]:
    """Returns the rules of free text up to the marker `last` and the white space after it."""
    if last.startswith("<["):
        return (f"think: ANY {last} SPACE", _ANY, _SPACE)
    return ("think: text SPACE", f"text[suffix={last}]: /(?s:.*)/", _SPACE)


def _either(rule: str, tools: Sequence[Any]) -> str:
    return " | ".join(f"{rule}_{number}" for number in range(len(tools)))


def _harmony(plan: AnswerPlan, grammar: str, marker: Marker) -> str:
    """Returns the grammar of gpt-oss's channels: analysis, then a final message or one call."""
    channel, message, constrain = map(marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    end, start = marker("<|end|>"), marker("<|start|>")
    analysis = f'analysis: {channel} "analysis" {message} ANY {end} {start} "assistant"'
    if plan.forced is None:
        rules = [f'start: analysis? {channel} "final" {message} @body', analysis, _ANY]
        return followed_by("\n".join(rules), grammar)
    tools = [one for one in plan.tools if plan.forced in ("", one["function"]["name"])]
    rules = [f"start: analysis? {channel} call", "call: " + _either("call", tools), analysis, _ANY]
    for number, tool in enumerate(tools):
        head = text_literal(f"commentary to=functions.{tool['function']['name']} ")
        schema = schema_rule(arguments_schema(tool))
        rules.append(f'call_{number}: {head} {constrain} "json" {message} {schema}')
    return lark_grammar("\n".join(rules))
