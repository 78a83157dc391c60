"""Keywords that llguidance does not support, in terms of keywords that it supports.

Each rewriting is local, and has exactly the values of the original: `dependencies`, `dependentRequired`,
`dependentSchemas`; `if`, `then`, `else`; `propertyNames` with `pattern` or `enum`; `minProperties` and
`maxProperties` beside optional members. `if` becomes `not`, for which `exclusive.py` computes the complement.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from itertools import chain, combinations, islice
from typing import Any

from disagg.core.json_schema.document import (
    Dialect,
    Schema,
    canonical,
    changed,
    dialect_of,
    members,
    properties,
)
from disagg.core.json_schema.facts import count

MAX_MEMBER_SETS = 64
"""Limit of the sets of members into which `minProperties` and `maxProperties` divide the values of a schema."""
_MOVED = re.compile(r"/(?:dependencies|dependentSchemas|else|if|not|propertyNames|then)(?:/|$)")
"""A reference into a schema that a rewriting moves."""
_NEGATED_PARTS = frozenset(("if", "not", "oneOf"))
"""Keywords whose schemas a value may have to violate."""
_LIMITS = ("minProperties", "maxProperties")
_MOST_CONDITION_CHARACTERS = 4096
"""Length, as JSON text, of the longest `if` that is rewritten."""
_NO_OBJECT = ["null", "boolean", "number", "string", "array"]
_OF_NAMES = frozenset(("$comment", "description", "enum", "pattern", "title", "type"))
"""Keywords of `propertyNames` that are rewritten, or restrict no name."""


def with_supported_keywords(root: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema of the same values without the keywords above, as far as this is possible.

    A schema stays as it is if its dialect is unknown, or if a `$ref` may lead into a part that would move.
    """
    dialect = dialect_of(root)
    if not dialect.known or not _is_movable(root):
        return root
    found: dict[str, Any] = changed(root, lambda one: _supported(dialect, one))
    return found


def with_old_dependencies(root: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema in which `dependencies` apply, also in dialects where a validator may ignore them.

    A schema with keywords that may negate another schema stays as it is: there, `dependencies` that are ignored
    exclude values that `dependencies` that apply do not exclude.
    """
    dialect = dialect_of(root)
    if not dialect.known or not _is_movable(root) or not _NEGATED_PARTS.isdisjoint(_keys(root)):
        return root
    found: dict[str, Any] = changed(root, _with_dependencies)
    return found


def _keys(value: Any) -> Iterator[str]:
    for key, one in value.items() if isinstance(value, dict) else ():
        yield key
        yield from _keys(one)
    for one in value if isinstance(value, list) else ():
        yield from _keys(one)


def _is_movable(root: dict[str, Any]) -> bool:
    """Whether all parts of a schema are of one dialect, and no `$ref` leads into a part that would move."""
    dialect = str(root.get("$schema")).rstrip("#")
    rest: list[Any] = [root]
    while rest:
        one = rest.pop()
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            if isinstance(value, dict | list):
                rest.append(value)
            elif (key == "$ref" and _MOVED.search(str(value))) or (
                key == "$schema" and str(value).rstrip("#") != dialect
            ):
                return False
    return True


def _supported(dialect: Dialect, schema: dict[str, Any]) -> dict[str, Any]:
    if dialect.dependencies:
        schema = _with_dependencies(schema)
    else:
        for keyword in ("dependentRequired", "dependentSchemas"):
            schema = _replaced(schema, (keyword,), _dependencies(schema, keyword))
    if dialect.conditions:
        schema = _replaced(schema, ("if", "then", "else"), _condition(schema))
    if schema.get("not") in (True, {}):
        schema = _replaced(schema, ("not",), [False])
    if dialect.names:
        schema = _replaced(schema, ("propertyNames",), _names(schema))
    return _replaced(schema, _LIMITS, _member_sets(schema))


def _with_dependencies(schema: dict[str, Any]) -> dict[str, Any]:
    return _replaced(schema, ("dependencies",), _dependencies(schema, "dependencies"))


def _replaced(schema: dict[str, Any], keywords: Iterable[str], parts: list[Schema] | None) -> dict[str, Any]:
    """Returns a schema with `parts` in the place of keywords; the schema itself without `parts`."""
    if parts is None:
        return schema
    rest = {key: one for key, one in schema.items() if key not in keywords}
    return {**rest, "allOf": [*members(schema, "allOf"), *parts]} if parts else rest


def _type_beside(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the type of a schema as a schema, so that its parts say nothing about other types."""
    return {"type": schema["type"]} if isinstance(schema.get("type"), str) else {}


def _dependencies(schema: dict[str, Any], keyword: str) -> list[Schema] | None:
    """Returns schemas of the objects without a member, or with what the member needs."""
    given = schema.get(keyword)
    if not isinstance(given, dict) or (
        keyword == "dependentRequired" and not all(map(_is_names, given.values()))
    ):
        return None
    names_by_need: dict[str, list[str]] = {}
    needs: dict[str, Schema] = {}
    for name, need in given.items():
        if _is_names(need):
            need = {**_type_beside(schema), "required": need}
        elif not isinstance(need, dict | bool):
            return None
        names_by_need.setdefault(canonical(need), []).append(name)
        needs[canonical(need)] = need
    return [
        {"anyOf": [{**_type_beside(schema), "properties": dict.fromkeys(names, False)}, needs[key]]}
        for key, names in names_by_need.items()
    ]


def _is_names(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _condition(schema: dict[str, Any]) -> list[Schema] | None:
    """Returns `if`, `then` and `else` as `anyOf`. Without `if`, the others have no effect. None for a long condition,
    which the result has twice: conditions in conditions would double at each level."""
    if not {"if", "then", "else"}.intersection(schema):
        return None
    if "if" not in schema or not {"then", "else"}.intersection(schema):
        return []
    if len(canonical(schema["if"])) > _MOST_CONDITION_CHARACTERS:
        return None
    condition, violated = schema["if"], {**_type_beside(schema), "not": schema["if"]}
    if "else" not in schema:
        return [{"anyOf": [violated, schema["then"]]}]
    if "then" not in schema:
        return [{"anyOf": [condition, schema["else"]]}]
    return [{"anyOf": [{"allOf": [condition, schema["then"]]}, {"allOf": [violated, schema["else"]]}]}]


def _names(schema: dict[str, Any]) -> list[Schema] | None:
    """Returns `propertyNames` as schemas of objects without additional members."""
    names = schema.get("propertyNames")
    if names is True:
        return []
    if (
        not isinstance(names, dict)
        or not _OF_NAMES.issuperset(names)
        or names.get("type", "string") != "string"
    ):
        return None
    found: list[Schema] = []
    if isinstance(names.get("pattern"), str):
        found.append({"patternProperties": {names["pattern"]: True}})
    if isinstance(names.get("enum"), list):
        texts = [one for one in names["enum"] if isinstance(one, str)]
        found.append({"properties": dict.fromkeys(texts, True)})
    return [{**_type_beside(schema), **one, "additionalProperties": False} for one in found]


def _member_sets(schema: dict[str, Any]) -> list[Schema] | None:
    """Returns `minProperties` and `maxProperties` as `anyOf` of sets of optional members, of which each is required
    or forbidden. llguidance supports both limits if no member of `properties` is optional."""
    if any(key in schema and count(schema, key) is None for key in _LIMITS):
        return None  # no integer, or written as a float: llguidance refuses it
    required = set(schema["required"]) if _is_names(schema.get("required")) else set()
    optional = [one for one in properties(schema) if one not in required]
    low, high = count(schema, "minProperties") or 0, count(schema, "maxProperties")
    low = max(low - len(required), 0)
    if not optional or (low == 0 and high is None) or (high is not None and high < len(required) + low):
        return None
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    if closed and low <= 1 and (high is None or high == len(required) + 1):
        return None  # llguidance supports these limits
    most = len(optional) if high is None else min(high - len(required), len(optional))
    if high is None:  # with `low` optional members, all others are free
        most = min(low, len(optional))
    least = low if closed else 0
    every = chain.from_iterable(combinations(optional, size) for size in range(least, most + 1))
    if len(chosen := list(islice(every, MAX_MEMBER_SETS + 1))) > MAX_MEMBER_SETS:
        return None
    limits: dict[str, Any] = {} if closed else {key: schema[key] for key in _LIMITS if key in schema}
    sets: list[Schema] = []
    for one in chosen:
        part: dict[str, Any] = {**_type_beside(schema), "required": [*one]}
        if high is not None or len(one) < low:
            part["properties"] = {name: False for name in optional if name not in one}
            part.update(limits)
        sets.append(part)
    return [{"anyOf": sets} if sets else {"type": _NO_OBJECT}]
