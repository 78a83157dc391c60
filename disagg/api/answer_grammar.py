"""Grammars of chat answers that must call a tool, or that reason or may call tools instead of a constrained text.

Reasoning is not constrained; the grammar applies to the text after the reasoning.
"""

from __future__ import annotations

from typing import Any

from disagg.api.errors import bad
from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.call_scanner import CallSyntax, Marker, json_call, several
from disagg.api.parsers.parts import schemas_of
from disagg.api.parsers.registry import SYNTAXES
from disagg.api.parsers.thinking import THINK_MARKERS
from disagg.api.structured import arguments_schema
from disagg.core.grammars import followed_by, lark_grammar, schema_grammar, schema_rule, text_literal

_ANY = r"ANY: /(?s:.*)/"
_SPACE = r"SPACE: /[ \n]{0,8}/"


def answer_grammar(plan: AnswerPlan, grammar: str, marker: Marker) -> str:
    """Returns the grammar of a whole answer whose content, or required calls, follow `grammar`.

    An answer that may call tools consists of content that follows `grammar`, or of calls.
    """
    if plan.names.harmony:
        return _harmony(plan, grammar, marker)
    markers = THINK_MARKERS.get(plan.names.reasoning)
    calls = _family_calls(plan, marker) if plan.tools and plan.forced is None else []
    if markers is None and not calls:
        return grammar
    rules = ["answer: @body | calls" if calls else "answer: @body", *calls]
    if markers is None:
        return followed_by("\n".join(("start: answer", *rules)), grammar)
    first, last = map(marker, markers)
    thinks = "think" if plan.thinking else f"({first} think)?"
    rules = list(dict.fromkeys((f"start: {thinks} answer", *rules, *_until(last))))
    return followed_by("\n".join(rules), grammar)


def calls_grammar(plan: AnswerPlan) -> str:
    """Returns the grammar of calls without a family's markers: arguments of the forced tool, or a list of calls."""
    if plan.forced:
        [tool] = [one for one in plan.tools if one["function"]["name"] == plan.forced]
        return schema_grammar(arguments_schema(tool))
    kinds = [
        json_call(tool["function"]["name"], "parameters", schema_rule(arguments_schema(tool)))
        for tool in plan.tools
    ]
    calls = several("call", kinds, '"," SPACE', parallel=plan.parallel)
    return lark_grammar("\n".join(('start: "[" calls "]"', *calls, _SPACE)))


def _family_calls(plan: AnswerPlan, marker: Marker) -> list[str]:
    """Returns the rule `calls` of one or more calls in the family's syntax, with the rules that `calls` needs.

    The calls fit the tools' schemas.
    """
    syntax = SYNTAXES[plan.names.tools](schemas_of(plan.tools))
    tools = {tool["function"]["name"]: f"arguments_{number}" for number, tool in enumerate(plan.tools)}
    schemas = [_arguments(plan, syntax, tool) for tool in plan.tools]
    rules = [f"{rule}: {schema}" for rule, schema in zip(tools.values(), schemas, strict=True)]
    return [*syntax.calls(tools, marker, parallel=plan.parallel), *rules, _SPACE]


def _arguments(plan: AnswerPlan, syntax: CallSyntax, tool: dict[str, Any]) -> str:
    """Returns the arguments of a tool as an expression. Raises a 400 for a schema that the syntax cannot ensure."""
    try:
        return syntax.arguments(arguments_schema(tool))
    except ValueError as exc:
        raise bad(
            "tools",
            f"tools: the schema of {tool['function']['name']} cannot be combined with response_format or another "
            f"grammar for this model (api.tool_parser = {plan.names.tools}): {exc}",
            "invalid_grammar",
        ) from exc


def _until(last: str) -> tuple[str, ...]:
    """Returns the rules of free text up to the marker `last` and the white space after it."""
    if last.startswith("<["):
        return (f"think: ANY {last} SPACE", _ANY, _SPACE)
    return ("think: text SPACE", f"text[suffix={last}]: /(?s:.*)/", _SPACE)


def _harmony(plan: AnswerPlan, grammar: str, marker: Marker) -> str:
    """Returns the grammar of gpt-oss's channels: analysis, then a final message or one call."""
    channel, message, constrain = map(marker, ("<|channel|>", "<|message|>", "<|constrain|>"))
    end, start = marker("<|end|>"), marker("<|start|>")
    analysis = f'analysis: {channel} "analysis" {message} ANY {end} {start} "assistant"'
    tools = [one for one in plan.tools if plan.forced in (None, "", one["function"]["name"])]
    ends = [f'"final" {message} @body'] if plan.forced is None else []
    for tool in tools:
        head = text_literal(f"commentary to=functions.{tool['function']['name']} ")
        ends.append(f'{head} {constrain} "json" {message} {schema_rule(arguments_schema(tool))}')
    text = "\n".join((f"start: analysis? {channel} ({' | '.join(ends)})", analysis, _ANY))
    return followed_by(text, grammar) if plan.forced is None else lark_grammar(text)
