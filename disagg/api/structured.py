"""Grammars of structured outputs: `response_format`, `structured_outputs` and the older `guided_*` fields."""

from __future__ import annotations

from typing import Any, NamedTuple

from disagg.api.errors import bad
from disagg.api.fields import AnswerBody, StructuredOutputs
from disagg.api.parsers.texts import load_json
from disagg.core.grammars import any_grammar, choice_grammar, regex_grammar, schema_grammar

ANY_OBJECT = {"type": "object"}


class Wanted(NamedTuple):
    """A grammar, and the name of the request field that contains the grammar."""

    param: str
    grammar: str


def has_grammar(body: AnswerBody) -> bool:
    """Returns whether a request has a field that `wanted_grammar` converts to a grammar or refuses."""
    guided = (body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    asked = body.response_format is not None and body.response_format.type != "text"
    outputs = body.structured_outputs is not None and body.structured_outputs != StructuredOutputs()
    return asked or outputs or any(one is not None for one in guided)


def wanted_grammar(body: AnswerBody) -> Wanted | None:
    """Returns the grammar in a request, or None. Raises a 400 for an invalid field, or for several fields with a
    grammar."""
    found = [one for one in (_response_format(body), *_structured_outputs(body), *_guided(body)) if one]
    if len(found) > 1:
        raise bad(
            found[1].param, f"{found[1].param} cannot be combined with {found[0].param}: give one of them"
        )
    if found and body.use_beam_search:
        raise bad("use_beam_search", f"use_beam_search does not support {found[0].param}")
    return found[0] if found else None


def _response_format(body: AnswerBody) -> Wanted | None:
    given = body.response_format
    if given is None or given.type == "text":
        return None
    if given.type == "json_object":
        return Wanted("response_format", schema_grammar(ANY_OBJECT))
    if given.json_schema is None:
        raise bad("response_format.json_schema", "response_format.json_schema is missing")
    return Wanted("response_format", schema_grammar(given.json_schema.schema_ or ANY_OBJECT))


def _structured_outputs(body: AnswerBody) -> list[Wanted]:
    return _choices("structured_outputs.", body.structured_outputs) if body.structured_outputs else []


def _guided(body: AnswerBody) -> list[Wanted]:
    """Returns the grammars of the fields that vLLM had before `structured_outputs`."""
    guided = StructuredOutputs(
        json=body.guided_json,
        regex=body.guided_regex,
        choice=body.guided_choice,
        grammar=body.guided_grammar,
    )
    return _choices("guided_", guided)


def _choices(prefix: str, given: StructuredOutputs) -> list[Wanted]:
    """Returns the grammar of each field that is set. `prefix`: text before a field's name in error messages."""
    found: list[Wanted] = []
    if given.json is not None:
        found.append(Wanted(f"{prefix}json", schema_grammar(_schema(f"{prefix}json", given.json))))
    if given.json_object:
        found.append(Wanted(f"{prefix}json_object", schema_grammar(ANY_OBJECT)))
    if given.regex is not None:
        found.append(Wanted(f"{prefix}regex", _made(f"{prefix}regex", regex_grammar, given.regex)))
    if given.choice is not None:
        if not given.choice or not all(given.choice):
            raise bad(f"{prefix}choice", f"{prefix}choice must be a list of texts, none of them empty")
        found.append(Wanted(f"{prefix}choice", choice_grammar(given.choice)))
    if given.grammar is not None:
        found.append(Wanted(f"{prefix}grammar", _made(f"{prefix}grammar", any_grammar, given.grammar)))
    return found


def _schema(param: str, given: dict[str, Any] | str) -> dict[str, Any]:
    if isinstance(given, dict):
        return given
    try:
        schema = load_json(given)
    except ValueError as exc:
        raise bad(param, f"{param} is not JSON: {exc}") from exc
    if not isinstance(schema, dict):
        raise bad(param, f"{param} must be a JSON object")
    return schema


def _made(param: str, make: Any, text: str) -> str:
    try:
        return str(make(text))
    except ValueError as exc:
        raise bad(param, f"{param} is not valid: {' '.join(str(exc).split())[:500]}") from exc


def arguments_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of a tool's arguments, which are always an object."""
    schema: dict[str, Any] = tool["function"].get("parameters") or {}
    return schema if schema.get("type") else {**schema, **ANY_OBJECT}
