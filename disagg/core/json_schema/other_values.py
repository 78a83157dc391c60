"""Values outside of limits and of lists of values, as schemas without `not`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from disagg.core.json_schema.context import Context
from disagg.core.json_schema.document import Schema
from disagg.core.json_schema.facts import FRACTION, KINDS, KINDS_OF_TYPE, count, is_number
from disagg.core.json_schema.other_texts import regex_of_other_texts

Union = list[Schema]
"""Schemas of which a value satisfies one at least; empty for no values, `[True]` for all."""
Rule = Callable[[Context, dict[str, Any]], Union | None]
"""Returns the values of a context that violate a keyword of a schema; None without such a union."""
_MAX_NUMBERS = 16
_MOST_EXACT = 1 << 53
"""64-bit floats hold every integer up to this one."""


def union_of(parts: Iterable[Union | None]) -> Union | None:
    """Returns the union of unions; None if one of them is unknown. No part after that one is computed."""
    found: Union = []
    for part in parts:
        if part is None:
            return None
        found += part
    return found


def types_of(kinds: frozenset[str]) -> Union:
    """Returns all values of some kinds."""
    names = [name for name in KINDS_OF_TYPE if name != FRACTION and KINDS_OF_TYPE[name] <= kinds]
    return [{"type": one} for one in names if not (one == "integer" and "number" in names)]


def count_rule(keyword: str, kind: str, opposite: str, step: int) -> Rule:
    """Returns the rule of a limit of items or characters. `opposite`: the keyword of values beyond the limit."""

    def rule(context: Context, schema: dict[str, Any]) -> Union | None:
        limit = count(schema, keyword)
        if limit is None:
            return None
        return [{"type": kind, opposite: limit + step}] if limit + step >= 0 else []

    return rule


def limit_rule(keyword: str) -> Rule:
    """Returns the rule of `minimum` or `maximum`."""
    exclusive = f"exclusive{keyword.capitalize()}"
    opposite = "maximum" if keyword == "minimum" else "minimum"

    def rule(context: Context, schema: dict[str, Any]) -> Union | None:
        limit = schema[keyword]
        if not _is_exact(limit):
            return None
        if context.document.dialect.boolean_exclusive and schema.get(exclusive) is True:
            return [{"type": "number", opposite: limit}]
        return _beyond(context, opposite, limit)

    return rule


def exclusive_rule(keyword: str) -> Rule:
    """Returns the rule of `exclusiveMinimum` or `exclusiveMaximum`."""
    opposite = "maximum" if keyword == "exclusiveMinimum" else "minimum"

    def rule(context: Context, schema: dict[str, Any]) -> Union | None:
        limit, dialect = schema[keyword], context.document.dialect
        if dialect.boolean_exclusive and isinstance(limit, bool):
            return []  # the rule of the limit reads this keyword
        exact = dialect.numeric_exclusive and _is_exact(limit)
        return [{"type": "number", opposite: limit}] if exact else None

    return rule


def _is_exact(limit: object) -> bool:
    """Whether a limit is a number that llguidance, which compares 64-bit floats, holds as it is."""
    return is_number(limit) and abs(limit) < _MOST_EXACT


def _beyond(context: Context, keyword: str, limit: float) -> Union | None:
    """Returns the numbers beyond a limit, the limit excluded. `keyword`: `minimum` or `maximum`.

    llguidance 1.9 generates 1 for numbers above 1 and below 1.5. No such range can arise if all limits are integers.
    """
    if context.document.has_fractions() and not context.excludes({"type": FRACTION}):
        return None
    exclusive = f"exclusive{keyword.capitalize()}"
    if context.document.dialect.numeric_exclusive:
        return [{"type": "number", exclusive: limit}]
    if context.document.dialect.boolean_exclusive:
        return [{"type": "number", keyword: limit, exclusive: True}]
    return None


def other_values(context: Context, values: list[Any]) -> Union | None:
    """Returns the values of a context that are none of `values`; None without such a union."""
    if any(isinstance(one, dict | list) and not context.excludes({"enum": [one]}) for one in values):
        return None
    scalars = [one for one in values if not isinstance(one, dict | list)]
    others = KINDS - {"string", "integer", FRACTION, "boolean"} - ({"null"} if None in scalars else set())
    booleans = [one for one in (False, True) if not any(one is other for other in scalars)]
    return union_of(
        (
            types_of(others),
            [{"enum": booleans}] if booleans else [],
            _other_strings(context, [one for one in scalars if isinstance(one, str)]),
            _other_numbers(context, sorted({one for one in scalars if is_number(one)})),
        )
    )


def _other_strings(context: Context, texts: list[str]) -> Union | None:
    kept = [one for one in texts if not context.excludes({"enum": [one]})]
    if not kept or context.excludes({"type": "string"}):
        return [{"type": "string"}]
    regex = regex_of_other_texts(kept)
    return None if regex is None else [{"type": "string", "pattern": regex}]


def _other_numbers(context: Context, numbers: list[float]) -> Union | None:
    kept = [one for one in numbers if not context.excludes({"enum": [one]})]
    if not kept or context.excludes({"type": "number"}):
        return [{"type": "number"}]
    if len(kept) > _MAX_NUMBERS or not all(map(_is_exact, kept)):
        return None
    low, high = _beyond(context, "maximum", kept[0]), _beyond(context, "minimum", kept[-1])
    return union_of((low, *(_between(context, one, other) for one, other in pairwise(kept)), high))


def _between(context: Context, low: float, high: float) -> Union | None:
    above, below = _beyond(context, "minimum", low), _beyond(context, "maximum", high)
    return None if above is None or below is None else [above[0] | below[0]]
