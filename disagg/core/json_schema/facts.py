"""What follows from a JSON schema about its values.

`alternatives` divides a schema into cases, each a `Facts`. Each value of the schema fits one of the cases. A case may
fit more values than the schema, because keywords that no proof needs are ignored.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, TypeGuard

from disagg.core.json_schema.document import (
    MISSING,
    VALUES_OF_STEP,
    Document,
    GaveUpError,
    Schema,
    members,
    pointed,
    properties,
)

FRACTION = "fraction"
"""Kind of the numbers that are no integers. In schemas of proofs, also the name of a type."""
KINDS_OF_TYPE = {
    "null": frozenset(("null",)),
    "boolean": frozenset(("boolean",)),
    "integer": frozenset(("integer",)),
    "number": frozenset(("integer", FRACTION)),
    FRACTION: frozenset((FRACTION,)),
    "string": frozenset(("string",)),
    "array": frozenset(("array",)),
    "object": frozenset(("object",)),
}
KINDS = frozenset[str]().union(*KINDS_OF_TYPE.values())
MAX_ALTERNATIVES = 64
"""Limit of the cases of a schema."""
_MAX_DEPTH = 12
"""Limit of references and combinations within each other; below, a schema allows all values."""
_UNSURE_REGEX = re.compile(r"\\[sSbBpP]")
"""Classes of characters that differ between regular expressions of JSON Schema and llguidance."""

Bound = tuple[float, bool]
"""A limit of numbers, and whether the limit itself is excluded."""


@dataclass(frozen=True)
class Members:
    """The members of an object: `properties` by name, and `others`, the schema of all other names."""

    properties: dict[str, Schema]
    others: Schema

    def schema(self, name: str) -> Schema:
        """Returns the schema of a member."""
        return self.properties.get(name, self.others)


@dataclass(frozen=True)
class Items:
    """The items of an array: schemas of the first ones, and the schema of the rest."""

    first: Sequence[Schema]
    rest: Schema

    def schema(self, index: int) -> Schema:
        """Returns the schema of an item."""
        return self.first[index] if index < len(self.first) else self.rest


@dataclass(frozen=True)
class Facts:
    """Restrictions that one value satisfies together. Each restricts values of one kind: `texts` strings, `low` and
    `high` numbers, and so on."""

    kinds: frozenset[str] = KINDS
    booleans: frozenset[bool] = frozenset((False, True))
    low: Bound | None = None
    high: Bound | None = None
    texts: frozenset[str] | None = None
    """The possible strings; None for all."""
    strings: tuple[dict[str, Any], ...] = ()
    """Schemas of strings, with `pattern`, `minLength` and `maxLength` only."""
    min_items: int = 0
    items: tuple[Items, ...] = ()
    max_items: int | None = None
    required: frozenset[str] = frozenset()
    members: tuple[Members, ...] = ()

    def and_(self, other: Facts) -> Facts:
        """Returns the restrictions of both."""
        texts = self.texts if other.texts is None else other.texts
        lengths = [one.max_items for one in (self, other) if one.max_items is not None]
        return Facts(
            kinds=self.kinds & other.kinds,
            booleans=self.booleans & other.booleans,
            low=max((one.low for one in (self, other) if one.low), default=None),
            high=_lowest([one.high for one in (self, other) if one.high], default=None),
            texts=self.texts & other.texts if self.texts is not None and other.texts is not None else texts,
            strings=self.strings + other.strings,
            min_items=max(self.min_items, other.min_items),
            max_items=min(lengths, default=None),
            items=self.items + other.items,
            required=self.required | other.required,
            members=self.members + other.members,
        )


ANY = Facts()
"""Fits all values."""


def alternatives(document: Document, schema: Schema, depth: int = 0) -> list[Facts]:
    """Returns the cases of a schema; an empty list if no value satisfies the schema.

    Raises `GaveUpError` for more than `MAX_ALTERNATIVES` cases.
    """
    document.spend()
    if schema is False:
        return []
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return [ANY]
    found = [ANY]
    if "$ref" in schema:
        target = pointed(document.root, schema["$ref"])
        found = [ANY] if target is MISSING else alternatives(document, target, depth + 1)
        if not document.dialect.ref_siblings:
            return found
    found = both(document, found, [_own_facts(document, schema)])
    for values in _value_lists(document, schema):
        found = both(document, found, values)
    for one in members(schema, "allOf"):
        found = both(document, found, alternatives(document, one, depth + 1))
    for keyword in ("anyOf", "oneOf"):  # a value of `oneOf` satisfies one of the branches at least
        if branches := members(schema, keyword):
            found = both(
                document, found, [case for one in branches for case in alternatives(document, one, depth + 1)]
            )
    return found


def both(document: Document, left: list[Facts], right: list[Facts]) -> list[Facts]:
    """Returns the cases of values that fit one of `left` and one of `right`, without cases of no kind."""
    if len(left) == 1 and left[0] is ANY:
        return right
    document.spend(len(left) * len(right))
    found = [one for one in (a.and_(b) for a, b in product(left, right)) if one.kinds]
    if len(found) > MAX_ALTERNATIVES:
        raise GaveUpError
    return found


def _own_facts(document: Document, schema: dict[str, Any]) -> Facts:
    """Returns the facts of a schema's own keywords: those that refer to no other schema, and those for items and
    members."""
    facts = Facts(
        kinds=kinds_of(schema),
        low=_bound(document, schema, "minimum", "exclusiveMinimum"),
        high=_bound(document, schema, "maximum", "exclusiveMaximum"),
        strings=tuple(_string_schemas(schema)),
        min_items=count(schema, "minItems") or 0,
        max_items=count(schema, "maxItems"),
        required=frozenset(one for one in members(schema, "required") if isinstance(one, str)),
    )
    if isinstance(schema.get("items"), dict | bool) and "prefixItems" not in schema:
        facts = replace(facts, items=(Items((), schema["items"]),))
    others = True if "patternProperties" in schema else schema.get("additionalProperties", True)
    if properties(schema) or others is not True:
        facts = replace(facts, members=(Members(properties(schema), others),))
    return facts


def kinds_of(schema: dict[str, Any]) -> frozenset[str]:
    """Returns the kinds that `type` allows."""
    given = schema.get("type", MISSING)
    names = given if isinstance(given, list) else [given]
    if not all(isinstance(one, str) and one in KINDS_OF_TYPE for one in names):
        return KINDS
    return frozenset[str]().union(*(KINDS_OF_TYPE[one] for one in names))


def count(schema: dict[str, Any], keyword: str) -> int | None:
    """Returns the value of a keyword that must be a number of items or characters; None for another value."""
    value = schema.get(keyword)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def is_number(value: object) -> TypeGuard[float]:
    """Whether a JSON value is a number, and finite: Python also reads NaN and 1e999."""
    return (isinstance(value, int) and not isinstance(value, bool)) or (
        isinstance(value, float) and math.isfinite(value)
    )


def _bound(document: Document, schema: dict[str, Any], inclusive: str, exclusive: str) -> Bound | None:
    """Returns the narrower of two limits of numbers."""
    found = [(schema[inclusive], False)] if is_number(schema.get(inclusive)) else []
    if document.dialect.numeric_exclusive and is_number(schema.get(exclusive)):
        found.append((schema[exclusive], True))
    elif document.dialect.boolean_exclusive and schema.get(exclusive) is True:
        found = [(value, True) for value, _ in found]
    narrower = max if inclusive == "minimum" else _lowest
    return narrower(found, default=None)


def _lowest(bounds: list[Bound], default: None) -> Bound | None:
    return min(bounds, default=default, key=lambda one: (one[0], not one[1]))


def _string_schemas(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    lengths = {key: value for key in ("minLength", "maxLength") if (value := count(schema, key)) is not None}
    if lengths:
        yield lengths
    pattern = schema.get("pattern")
    if isinstance(pattern, str) and not _UNSURE_REGEX.search(pattern):
        yield {"pattern": pattern}


def _value_lists(document: Document, schema: dict[str, Any]) -> Iterator[list[Facts]]:
    """Yields the cases of `enum`, and of `const`."""
    if isinstance(schema.get("enum"), list):
        document.spend(len(schema["enum"]) // VALUES_OF_STEP)
        yield facts_of_values(schema["enum"])
    if "const" in schema and document.dialect.const:
        yield facts_of_values([schema["const"]])


def facts_of_values(values: list[Any]) -> list[Facts]:
    """Returns cases that fit JSON values. Strings share a case, and so do booleans."""
    texts = frozenset(one for one in values if isinstance(one, str))
    booleans = frozenset(one for one in values if isinstance(one, bool))
    found = [Facts(kinds=KINDS_OF_TYPE["string"], texts=texts)] if texts else []
    if booleans:
        found.append(Facts(kinds=KINDS_OF_TYPE["boolean"], booleans=booleans))
    return found + [_facts_of_value(one) for one in values if not isinstance(one, bool | str)]


def _facts_of_value(value: Any) -> Facts:
    if value is None:
        return Facts(kinds=KINDS_OF_TYPE["null"])
    if isinstance(value, list):
        first = [_only(one) for one in value]
        return Facts(
            kinds=KINDS_OF_TYPE["array"],
            min_items=len(value),
            max_items=len(value),
            items=(Items(first, False),),
        )
    if isinstance(value, dict):
        exact = Members({name: _only(one) for name, one in value.items()}, False)
        return Facts(kinds=KINDS_OF_TYPE["object"], required=frozenset(value), members=(exact,))
    if not is_number(value):
        return Facts(kinds=KINDS_OF_TYPE["number"])
    if isinstance(value, int):
        kinds = KINDS_OF_TYPE["integer"]
    else:  # a draft may count 1.0 as an integer or not
        kinds = KINDS_OF_TYPE["number" if value.is_integer() else FRACTION]
    return Facts(kinds=kinds, low=(value, False), high=(value, False))


def _only(value: Any) -> dict[str, Any]:
    return {"enum": [value]}
