"""Proves that no value satisfies several JSON schemas at the same time.

A proof is never wrong, but not every fact has a proof: False also means that no proof was found. Schemas of strings
are compared by `Document.no_text`. `format` proves nothing, because validators may ignore `format`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from disagg.core.json_schema.document import Document, Schema
from disagg.core.json_schema.facts import ANY, Facts, alternatives, both

_MAX_DEPTH = 8
"""Limit of members and items within each other that a proof reads."""


def impossible(document: Document, schemas: Sequence[Schema], depth: int = 0) -> bool:
    """Whether no value satisfies all schemas. Raises `GaveUpError` if the effort is too large."""
    if depth > _MAX_DEPTH:
        return False
    cases = [ANY]
    for one in schemas:
        cases = both(document, cases, alternatives(document, one))
    return all(_no_value(document, one, depth) for one in cases)


def _no_value(document: Document, facts: Facts, depth: int) -> bool:
    return all(_none_of_kind(document, facts, kind, depth) for kind in sorted(facts.kinds))


def _none_of_kind(document: Document, facts: Facts, kind: str, depth: int) -> bool:
    if kind == "boolean":
        return not facts.booleans
    if kind == "integer":
        return _no_integer(facts)
    if kind == "fraction":
        return _no_number(facts)
    if kind == "string":
        return _no_string(document, facts)
    if kind == "array":
        return _no_array(document, facts, depth)
    if kind == "object":
        return _no_object(document, facts, depth)
    return False


def _no_number(facts: Facts) -> bool:
    if facts.low is None or facts.high is None:
        return False
    (low, after), (high, before) = facts.low, facts.high
    return low > high or (low == high and (after or before))


def _no_integer(facts: Facts) -> bool:
    if facts.low is None or facts.high is None:
        return False
    (low, after), (high, before) = facts.low, facts.high
    first = math.floor(low) + 1 if after else math.ceil(low)
    last = math.ceil(high) - 1 if before else math.floor(high)
    return first > last


def _no_string(document: Document, facts: Facts) -> bool:
    least = max((one.get("minLength", 0) for one in facts.strings), default=0)
    most = min((one.get("maxLength", math.inf) for one in facts.strings), default=math.inf)
    patterns = [one for one in facts.strings if "pattern" in one]
    if facts.texts is None:
        lengths = [one for one in facts.strings if "pattern" not in one]
        several = len(patterns) > 1 or bool(patterns and lengths)
        return least > most or (several and document.no_text(list(facts.strings)))
    texts = sorted(one for one in facts.texts if least <= len(one) <= most)
    return not texts or (bool(patterns) and document.no_text([{"enum": texts}, *patterns]))


def _no_array(document: Document, facts: Facts, depth: int) -> bool:
    if facts.max_items is not None and facts.min_items > facts.max_items:
        return True
    checked = min(facts.min_items, max((len(one.first) for one in facts.items), default=0) + 1)
    return any(
        impossible(document, [one.schema(index) for one in facts.items], depth + 1)
        for index in range(checked)
    )


def _no_object(document: Document, facts: Facts, depth: int) -> bool:
    return any(
        impossible(document, [one.schema(name) for one in facts.members], depth + 1)
        for name in sorted(facts.required)
    )
