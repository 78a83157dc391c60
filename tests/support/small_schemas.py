"""Small JSON schemas at random, and all small JSON values of some shapes, for tests that compare schemas."""

from __future__ import annotations

import itertools
import json
import random
from functools import cache
from typing import Any

from jsonschema.validators import validator_for
from llguidance import LLTokenizer

from disagg.core.grammars import compile_grammar, schema_grammar

SCALARS = (None, True, False, -1, 0, 1, 2, 3, 5, 1.5, "", "a", "b", "ab", "abc")
TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
NAMES = "abc"


def small_values() -> list[Any]:
    """Returns all scalars of `SCALARS`, and all arrays and objects of few of them."""
    arrays = (
        list(items) for length in range(3) for items in itertools.product((None, 1, "a", "b"), repeat=length)
    )
    objects = (
        dict(zip(names, values, strict=True))
        for length in range(4)
        for names in itertools.combinations(NAMES, length)
        for values in itertools.product(("a", "b", 1, None), repeat=length)
    )
    nested: list[Any] = [
        ["a", "b", "a"],
        [[]],
        {"a": {}},
        {"a": {"a": 1}},
        {"a": {"b": "a"}},
        {"a": ["a"]},
        {"a": True},
    ]
    return [*SCALARS, *arrays, *objects, *nested]


@cache
def _values() -> list[Any]:
    return small_values()


def rewritten(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema that llguidance reads, without its options."""
    [grammar] = json.loads(schema_grammar(schema))["grammars"]
    return {key: one for key, one in grammar["json_schema"].items() if key != "x-guidance"}


def valid(schema: Any) -> list[Any]:
    """Returns the small values that jsonschema finds valid."""
    validator = validator_for(schema)(schema)
    return [one for one in _values() if validator.is_valid(one)]


def generated(schema: dict[str, Any]) -> list[Any]:
    """Returns the small values that llguidance generates for a schema, with members in the order of their names."""
    matcher = compile_grammar(schema_grammar(schema), LLTokenizer("byte"))
    found = []
    for value in _values():
        text = json.dumps(value).encode()
        fresh = matcher.deep_copy()
        if fresh.try_consume_tokens(list(text)) == len(text) and fresh.is_accepting():
            found.append(value)
    return found


class RandomSchemas:
    """Draws schemas with most keywords of JSON Schema, in combinations that often overlap and sometimes conflict.

    `all_keywords`: also keywords that llguidance does not support.
    """

    def __init__(self, seed: int, all_keywords: bool = False) -> None:
        self._random = random.Random(seed)
        self._all_keywords = all_keywords
        self._references: list[str] = []

    def document(self) -> dict[str, Any]:
        """Returns a schema with `oneOf`, sometimes with keywords beside it."""
        definitions = {}
        for name in "xy":  # no definition leads to itself
            definitions[name] = self.schema(1)
            self._references.append(f"#/$defs/{name}")
        branches = [self.schema(2) for _ in range(self._random.choice((1, 2, 2, 2, 3, 3, 4)))]
        beside = self._object(1) if self._random.random() < 0.5 else {}
        return {**beside, "oneOf": branches, "$defs": definitions}

    def schema(self, depth: int) -> Any:
        """Returns a schema in which `depth` levels are nested at most."""
        chance = self._random.random()
        if depth <= 0 or chance < 0.35:
            return self._leaf()
        if chance < 0.7:
            return self._object(depth)
        if chance < 0.8:
            return self._array(depth)
        keyword = "anyOf" if chance < 0.87 else "allOf" if chance < 0.93 else "oneOf"
        return {keyword: [self.schema(depth - 1) for _ in range(self._random.randint(1, 3))]}

    def _leaf(self) -> Any:
        draw = self._random
        limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
        choices: tuple[Any, ...] = (
            {"type": draw.choice(TYPES)},
            {"type": draw.sample(TYPES, 2)},
            {"enum": draw.sample(SCALARS, draw.randint(1, 3))},
            {"const": draw.choice((*SCALARS, ["a"], {"a": 1}))},
            {draw.choice(limits): draw.randint(-1, 4)},
            {"type": "integer", "minimum": draw.randint(0, 2), "maximum": draw.randint(1, 4)},
            {"type": "string", "minLength": draw.randint(0, 3)},
            {"maxLength": draw.randint(0, 3)},
            {"type": "string", "pattern": draw.choice(("^a", "b$", "^ab?$", "^$", "c"))},
            draw.choice((True, False, {})),
            {"$ref": draw.choice(self._references)} if self._references else True,
            draw.choice(({"multipleOf": 2}, {"format": "date"}, {"not": {"type": "string"}})),
        )
        return draw.choice(choices)

    def _object(self, depth: int) -> dict[str, Any]:
        draw = self._random
        found: dict[str, Any] = {"type": "object"} if draw.random() < 0.6 else {}
        if draw.random() < 0.7:
            found["properties"] = {
                name: self.schema(depth - 1) for name in draw.sample(NAMES, draw.randint(1, 2))
            }
        if draw.random() < 0.6:
            found["required"] = draw.sample(NAMES, draw.randint(1, 2))
        if draw.random() < 0.3:
            found["additionalProperties"] = draw.choice((False, False, self._leaf()))
        if draw.random() < 0.05:
            found["patternProperties"] = {"^a": self._leaf()}
        if self._all_keywords:
            found |= self._unsupported(depth)
        return found

    def _unsupported(self, depth: int) -> dict[str, Any]:
        draw = self._random
        a, b = draw.sample(NAMES, 2)
        choices: tuple[dict[str, Any], ...] = (
            {},
            {"dependentRequired": {a: [b]}},
            {"dependentRequired": {a: [b], b: [a]}, "dependentSchemas": {a: self.schema(depth - 1)}},
            {"not": self.schema(depth - 1)},
            {"if": self.schema(depth - 1), "then": self.schema(depth - 1)},
            {"if": self.schema(depth - 1), "else": self.schema(depth - 1)},
            {"if": self.schema(depth - 1), "then": self._leaf(), "else": self._leaf()},
            {"propertyNames": {"pattern": draw.choice(("^a", "b$", "a|b"))}},
            {"propertyNames": {"enum": [a, b]}},
            {"minProperties": draw.randint(0, 3)},
            {"maxProperties": draw.randint(0, 3)},
            {"minProperties": draw.randint(0, 2), "maxProperties": draw.randint(0, 3)},
        )
        return draw.choice(choices)

    def _array(self, depth: int) -> dict[str, Any]:
        draw = self._random
        found: dict[str, Any] = {"type": "array"} if draw.random() < 0.6 else {}
        if draw.random() < 0.7:
            found["items"] = self.schema(depth - 1)
        if draw.random() < 0.4:
            found[draw.choice(("minItems", "maxItems"))] = draw.randint(0, 2)
        if draw.random() < 0.05:
            found["prefixItems"] = [self._leaf()]
        return found
