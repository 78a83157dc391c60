"""Keywords that llguidance does not support: the same values as jsonschema finds valid, or the schema is refused."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLTokenizer
from small_schemas import RandomSchemas, generated, rewritten, valid

from disagg.core.errors import InvalidRequestError
from disagg.core.grammars import compile_grammar, schema_grammar
from disagg.core.json_schema.document import canonical
from disagg.core.json_schema.other_keywords import MAX_MEMBER_SETS

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_6 = {"$schema": "http://json-schema.org/draft-06/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
CLOSED = {"type": "object", "additionalProperties": False}
ABC: dict[str, Any] = {"a": {}, "b": {}, "c": {}}
A, B, C = ({"required": [name]} for name in "abc")
TEXT = {"type": "string"}
A_IS_TEXT = {"type": "object", "required": ["a"], "properties": {"a": TEXT}}

SUPPORTED: dict[str, dict[str, Any]] = {
    "dependencies of names": {**DRAFT_7, **CLOSED, "properties": ABC, "dependencies": {"a": ["b", "c"]}},
    "dependencies that need the same": {
        **DRAFT_4,
        "type": "object",
        "dependencies": {"a": ["c"], "b": ["c"]},
    },
    "dependencies of any type": {**DRAFT_7, "properties": ABC, "dependencies": {"a": ["b"]}},
    "dependencies of schemas": {
        **DRAFT_4,
        "dependencies": {"a": {"properties": {"b": {"enum": ["a"]}}}, "c": ["a"]},
    },
    "dependencies that forbid": {**DRAFT_7, "dependencies": {"a": False, "b": True}},
    "dependencies in a branch": {
        **DRAFT_7,
        **CLOSED,
        "properties": ABC,
        "oneOf": [{"dependencies": {"a": ["b"]}}, {"required": ["c"]}],
    },
    "dependencies in a part of the same dialect": {
        **DRAFT_4,
        "items": {**DRAFT_4, "type": "object", "dependencies": {"a": ["b"]}},
    },
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"], "b": ["a"]}},
    "dependentSchemas": {"dependentSchemas": {"a": {"maxProperties": 1}}},
    "a name of a keyword": {"properties": {"dependentRequired": {"type": "null"}, "not": {"type": "null"}}},
    "not": {"not": {"type": ["array", "object"]}},
    "not anything": {"properties": {"a": {"not": {}}, "b": {"not": True}}},
    "not nothing": {"type": "string", "not": False},
    "not required": {"type": "object", "not": {"required": ["a"]}},
    "not required together": {"type": "object", "not": {"allOf": [A, B]}},
    "not required, of any type": {"not": {"required": ["a"]}},
    "not one of some texts": {"type": "string", "not": {"enum": ["a", "ab"]}},
    "not not": {"not": {"not": {"type": "string"}}},
    "not not, beside a member that is missing": {
        "not": {"$ref": "#/$defs/x"},
        "$defs": {"x": {"required": ["a"], "not": {**A_IS_TEXT, "properties": {"a": TEXT, "b": TEXT}}}},
    },
    "not not, of a member": {
        "not": {"$ref": "#/$defs/x"},
        "$defs": {"x": {"required": ["a"], "not": A_IS_TEXT}},
    },
    "not not anything": {"type": "object", "not": {"required": ["a"], "not": True}},
    "not beside oneOf": {"type": "object", "oneOf": [A, B], "not": {"required": ["c"]}},
    "not behind a reference": {"not": {"$ref": "#/$defs/x"}, "$defs": {"x": {"not": {"type": "null"}}}},
    "not in a branch": {"oneOf": [{"type": "object", "not": {"required": ["a"]}}, {"required": ["b"]}]},
    "then": {"type": "object", "if": A, "then": B},
    "then, of any type": {"if": {"type": "string"}, "then": {"maxLength": 1}},
    "else": {"type": "object", "if": A, "else": B},
    "then and else": {
        **CLOSED,
        "properties": ABC,
        "if": {"properties": {"a": {"const": "a"}}, "required": ["a"]},
        "then": {"required": ["b"]},
        "else": {"required": ["c"]},
    },
    "if alone": {"type": "object", "if": A},
    "then alone": {"type": "object", "then": A, "else": B},
    "names of a pattern": {"type": "object", "propertyNames": {"pattern": "^[ab]$"}},
    "names of a pattern beside properties": {"properties": ABC, "propertyNames": {"pattern": "a|b"}},
    "names of a list": {"propertyNames": {"type": "string", "enum": ["a", "c"], "description": "x"}},
    "any names": {"type": "object", "propertyNames": True},
    "a member at least": {"type": "object", "properties": ABC, "minProperties": 1},
    "members of any type": {"properties": ABC, "minProperties": 2},
    "two members at least": {**CLOSED, "properties": ABC, "minProperties": 2},
    "more members than are named": {"type": "object", "properties": {"a": {}}, "minProperties": 2},
    "two members at most": {**CLOSED, "properties": ABC, "maxProperties": 2},
    "two open members at most": {"type": "object", "properties": {"a": {}, "b": {}}, "maxProperties": 2},
    "more members than a closed object has": {
        "properties": {"a": {}},
        "additionalProperties": False,
        "minProperties": 2,
    },
    "no optional member": {**CLOSED, "properties": ABC, **A, "maxProperties": 1},
    "two or three members, one of them named": {
        "type": "object",
        "properties": {"a": {}, "b": {}},
        "required": ["a"],
        "minProperties": 2,
        "maxProperties": 3,
    },
    "members of a pattern": {
        **CLOSED,
        "properties": {"a": {}},
        "patternProperties": {"^[bc]$": {"type": "string"}},
        "minProperties": 2,
    },
}
REFUSED: dict[str, dict[str, Any]] = {
    "not of a pattern": {"type": "string", "not": {"pattern": "a"}},
    "not of an item": {"type": "array", "not": {"items": {"not": {"type": "string"}}}},
    "if of a pattern": {"type": "string", "if": {"pattern": "a"}, "then": {"minLength": 2}},
    "lengths of names": {"type": "object", "propertyNames": {"maxLength": 2}},
    "a reference into a part that moves": {
        **DRAFT_7,
        "properties": {"a": {"$ref": "#/dependencies/a"}},
        "dependencies": {"a": {"required": ["b"]}},
    },
    "a reference into not": {"not": {"type": "string"}, "items": {"$ref": "#/not"}},
    "a part of another dialect": {
        **DRAFT_4,
        "items": {**DRAFT_7, "type": "object", "dependencies": {"a": ["b"]}},
    },
    "an unknown dialect": {
        "$schema": "http://json-schema.org/draft-03/schema#",
        "dependencies": {"a": ["b"]},
    },
    "too many sets of members": {
        "type": "object",
        "properties": {f"{one}": {} for one in range(MAX_MEMBER_SETS)},
        "minProperties": 2,
    },
    "old dependencies in a branch": {
        "oneOf": [{"type": "object", "dependencies": {"a": ["b"]}}, {"type": "object", "required": ["a"]}]
    },
    "old dependencies beside another document": {
        "oneOf": [{"type": "object", "dependencies": {"a": ["b"]}}, {"type": "null"}],
        "$defs": {"x": {"$id": "http://x/y"}},
    },
    "old dependencies that not negates": {"type": "object", "not": {"dependencies": {"a": ["b"]}}},
}


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_keywords_have_the_same_values(name: str) -> None:
    schema = SUPPORTED[name]
    expected = valid(schema)
    assert valid(rewritten(schema)) == expected
    found = generated(schema)
    assert found
    assert all(one in expected for one in found)


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_exact_rewriting_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequestError, match=r"Unimplemented|only supported|oneOf must satisfy"):
        compile_grammar(schema_grammar(REFUSED[name]), LLTokenizer("byte"))


def test_old_dependencies_apply_in_new_dialects_where_nothing_is_negated() -> None:
    schema = {"type": "object", "oneOf": [B, C], "dependencies": {"b": ["a"]}}
    found = generated(schema)
    assert {"a": "a", "b": "a"} in found
    assert found == generated({**DRAFT_7, **schema})
    assert all("a" in one for one in found if "b" in one)


@pytest.mark.parametrize(
    ("dialect", "keyword"), [(DRAFT_4, "propertyNames"), (DRAFT_6, "if"), (DRAFT_4, "if")]
)
def test_keywords_that_a_draft_ignores_have_no_effect(dialect: dict[str, Any], keyword: str) -> None:
    schema = {**dialect, "type": "object", keyword: {"enum": ["b"]}, "then": False}
    assert rewritten(schema) == schema
    assert {"a": 1} in generated(schema)


def same_values(seeds: range) -> int:
    """Compares random schemas with what they become and with what llguidance generates. Returns how many compile."""
    compiled = 0
    for seed in seeds:
        schema = RandomSchemas(seed, all_keywords=True).document()
        expected = valid(schema)
        assert valid(rewritten(schema)) == expected, (seed, schema)
        try:
            found = generated(schema)
        except InvalidRequestError:
            continue
        compiled += 1
        wrong = [one for one in found if one not in expected]
        assert not wrong, (seed, schema, wrong)
    return compiled


def test_random_schemas_of_all_keywords_keep_their_values() -> None:
    assert same_values(range(8)) > 2


@pytest.mark.slow
def test_many_random_schemas_of_all_keywords_keep_their_values() -> None:
    assert same_values(range(8, 600)) > 150


@pytest.mark.parametrize("limits", [{"minProperties": 2.0, "maxProperties": 3}, {"minProperties": "2"}])
def test_limits_that_are_no_integers_are_not_lost(limits: dict[str, Any]) -> None:
    schema = {**CLOSED, "properties": ABC, **limits}
    assert limits.items() <= rewritten(schema).items()


def test_conditions_in_conditions_do_not_double_at_each_level() -> None:
    schema: dict[str, Any] = {"type": "string", "minLength": 1}
    for number in range(30):
        schema = {"if": schema, "then": {"maxLength": 9 + number}, "else": {"maxLength": 5}}
    assert len(canonical(rewritten(schema))) < 20_000
    with pytest.raises(InvalidRequestError):
        compile_grammar(schema_grammar(schema), LLTokenizer("byte"))
