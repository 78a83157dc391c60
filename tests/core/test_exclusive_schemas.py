"""`oneOf` as `anyOf`: the same values as jsonschema finds valid, or the schema stays as it is."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from jsonschema.validators import validator_for
from llguidance import LLTokenizer
from small_schemas import RandomSchemas, generated, rewritten, valid

from disagg.core.errors import InvalidRequestError
from disagg.core.grammars import MAX_PROVEN_CHARACTERS, compile_grammar, schema_grammar, schema_rule
from disagg.core.json_schema.document import MAX_REGEX_PROOFS, MAX_STEPS, Document, GaveUpError
from disagg.core.json_schema.exclusive import without_negations
from disagg.core.json_schema.impossible import impossible
from disagg.core.json_schema.other_texts import MAX_SIZE, regex_of_other_texts

DRAFT_4 = {"$schema": "http://json-schema.org/draft-04/schema#"}
DRAFT_7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
A, B, C = ({"required": [name]} for name in "abc")
CLOSED = {"type": "object", "additionalProperties": False}


def kind(value: Any, **others: Any) -> dict[str, Any]:
    return {"type": "object", "required": ["a"], "properties": {"a": value, **others}}


REWRITTEN: dict[str, dict[str, Any]] = {
    "one branch": {"oneOf": [{"type": "string"}]},
    "types": {"oneOf": [{"type": "string"}, {"type": ["null", "array"]}]},
    "types and true": {"oneOf": [{"type": "string"}, True]},
    "types behind references": {
        "oneOf": [{"$ref": "#/$defs/x"}, {"type": "null"}],
        "$defs": {"x": {"$ref": "#/$defs/y~1z"}, "y/z": {"type": "string"}},
    },
    "keywords beside a reference before draft 2019": {
        **DRAFT_7,
        "oneOf": [{"$ref": "#/definitions/x", "type": "string"}, {"type": "null"}],
        "definitions": {"x": {}},
    },
    "equal branches": {"oneOf": [{"type": "string"}, {"type": "string"}, {"type": "null"}]},
    "equal branches with a pattern": {
        "oneOf": [{"type": "string", "pattern": "a"}, {"type": "string", "pattern": "a"}, {"type": "null"}]
    },
    "keywords of other types": {
        "type": "string",
        "oneOf": [{"minLength": 2}, {"multipleOf": 2, "minItems": 1}],
    },
    "equal members with a pattern": {
        "oneOf": [kind({"pattern": "a"}), kind({"pattern": "a"}, b={"type": "null"})]
    },
    "branch within a branch": {"oneOf": [{"type": "string"}, {"enum": ["a", "b"]}]},
    "disjoint enums": {"oneOf": [{"enum": ["a", 1, None]}, {"enum": ["b", 2, True]}]},
    "overlapping enums": {"oneOf": [{"enum": ["a", "b", 1, 2, True]}, {"enum": ["b", 1, 3, True, False]}]},
    "constants": {"type": "number", "oneOf": [{"const": 1}, {"const": 2}, {"const": 1.5}]},
    "string or a word": {"oneOf": [{"type": "string"}, {"enum": ["", "ab"]}]},
    "number or a number": {"oneOf": [{"type": "number"}, {"enum": [1, 3, 2]}]},
    "ranges": {"type": "integer", "oneOf": [{"maximum": 1}, {"minimum": 2}]},
    "ranges of integers with limits excluded": {
        "type": "integer",
        "oneOf": [{"exclusiveMaximum": 2}, {"exclusiveMinimum": 1}],
    },
    "overlapping ranges": {
        "oneOf": [{"type": "number", "minimum": 1}, {"type": "number", "exclusiveMaximum": 3}]
    },
    "overlapping ranges of draft 4": {
        **DRAFT_4,
        "type": "number",
        "oneOf": [{"minimum": 1, "exclusiveMinimum": True}, {"maximum": 3}, {"minimum": 5}],
    },
    "lengths": {"type": "string", "oneOf": [{"minLength": 2}, {"maxLength": 2}]},
    "patterns": {"type": "string", "oneOf": [{"pattern": "^a$"}, {"pattern": "^a.+$"}, {"enum": ["b"]}]},
    "numbers of items": {"type": "array", "oneOf": [{"minItems": 1}, {"maxItems": 1}]},
    "items": {"oneOf": [{"type": "array", "items": {"type": one}} for one in ("string", "integer")]},
    "items, one at least": {
        "oneOf": [{"type": "array", "minItems": 1, "items": {"type": one}} for one in ("string", "null")]
    },
    "arrays and constants": {"oneOf": [{"const": ["a"]}, {"type": "array", "items": {"type": "integer"}}]},
    "required": {"oneOf": [A, B]},
    "required, closed": {**CLOSED, "properties": {"a": {}, "b": {}}, "oneOf": [A, B]},
    "required, of three": {"type": "object", "oneOf": [A, {"required": ["b", "c"]}, B]},
    "required beside the branches": {
        "type": "object",
        "required": ["a"],
        "oneOf": [A, {"required": ["b", "c"]}],
    },
    "required in combinations": {
        "type": "object",
        "oneOf": [{"anyOf": [A, B]}, {"allOf": [B, C]}],
    },
    "required with properties": {
        "type": "object",
        "oneOf": [
            {**A, "properties": {"a": {"type": "string"}}},
            {**B, "properties": {"b": {"type": "null"}}},
        ],
    },
    "forbidden by closed objects": {
        "oneOf": [{**CLOSED, **A, "properties": {"a": {}}}, {**CLOSED, **B, "properties": {"a": {}, "b": {}}}]
    },
    "closed objects that overlap": {
        "oneOf": [{**CLOSED, "properties": {"a": {}}}, {**CLOSED, "properties": {"a": {}, "b": {}}}]
    },
    "discriminator": {"oneOf": [kind({"const": "a"}), kind({"enum": ["b", 1]}), {"type": "string"}]},
    "discriminator behind references": {
        "oneOf": [{"$ref": "#/$defs/x"}, {"$ref": "#/$defs/y"}],
        "$defs": {"x": kind({"$ref": "#/$defs/z"}), "y": kind({"const": "b"}), "z": {"const": "a"}},
    },
    "discriminator required beside the branches": {
        **A,
        "oneOf": [{"properties": {"a": {"const": "a"}}}, {"properties": {"a": {"const": "b"}}}],
    },
    "discriminator that may be missing": {
        **CLOSED,
        "properties": {"a": {"enum": ["a", "b", 1]}, "b": {}},
        "oneOf": [{**B, "properties": {"a": {"enum": [one]}}} for one in ("a", "b")],
    },
    "nested": {"oneOf": [{"oneOf": [{"enum": ["a"]}, {"enum": ["b"]}]}, {"type": "string", "minLength": 1}]},
    "recursive": {
        "oneOf": [
            {"type": "null"},
            {**CLOSED, "properties": {"a": {"$ref": "#"}}},
            {"type": "array", "items": {"$ref": "#"}},
        ]
    },
    "beside anyOf": {"anyOf": [A, B], "oneOf": [{"type": "object"}, {"type": "array"}]},
    "nothing is valid": {"type": "object", "required": ["a", "b"], "oneOf": [A, B]},
}
STAYS: dict[str, dict[str, Any]] = {
    "patterns that overlap": {"type": "string", "oneOf": [{"pattern": "a"}, {"pattern": "b"}]},
    "integer or number": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "arrays or a constant": {"oneOf": [{"type": "array"}, {"const": ["a"]}]},
    "arrays that overlap": {"oneOf": [{"items": {"type": "string"}}, {"items": {"minLength": 1}}]},
    "number or a fraction": {"oneOf": [{"type": "number"}, {"enum": [1, 1.5]}]},
    "texts with quotation marks": {"oneOf": [{"type": "string"}, {"enum": ['"']}]},
    "formats": {"type": "string", "oneOf": [{"format": "date"}, {"format": "ipv4"}]},
    "multiples": {"type": "integer", "oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]},
    "white space, which dialects define differently": {
        "type": "string",
        "oneOf": [{"pattern": r"^\S$"}, {"pattern": r"^\s$"}],
    },
    "objects open at the ends": {
        "oneOf": [{"properties": {"a": {"pattern": "a"}}}, {"properties": {"b": {"pattern": "b"}}}]
    },
    "reference into a branch": {
        "oneOf": [{"type": "null"}, {"type": "array", "items": {"$ref": "#/oneOf/0"}}],
    },
    "another document within": {
        "oneOf": [{"$id": "http://x/y", "type": "array", "items": {"$ref": "#/$defs/z"}}, {"type": "null"}],
    },
    "integers before draft 6": {**DRAFT_4, "oneOf": [{"enum": [1.0]}, {"type": "integer"}]},
    "a value that no float holds": {
        "oneOf": [{"type": "integer", "minimum": 0, "maximum": 1 << 55}, {"const": (1 << 55) - 1}]
    },
    "limits that no float holds": {
        "oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": (1 << 53) + 1}]
    },
    "exclusive limits that no float holds": {
        "oneOf": [
            {"type": "integer", "exclusiveMinimum": 0},
            {"type": "integer", "exclusiveMaximum": 1 << 54},
        ]
    },
    "long lists of values": {
        "oneOf": [
            {"enum": [f"a{number}" for number in range(2000)]},
            {"enum": [f"a{number}" for number in range(1, 2001)]},
        ]
    },
    "more characters than are read": {
        "description": "a" * MAX_PROVEN_CHARACTERS,
        "oneOf": [{"required": ["a"]}, {"required": ["b"]}],
    },
    "items of tuples beside the branches": {
        "prefixItems": [{}],
        "items": {"type": "null"},
        "oneOf": [{"type": "array", "items": {"type": "null"}}, {"type": "array", "maxItems": 1}],
    },
    "items of tuples": {
        "oneOf": [
            {"type": "array", "prefixItems": [{}], "items": {"type": "null"}},
            {"type": "array", "items": {"type": "null"}},
        ],
    },
}


IMPOSSIBLE: dict[str, tuple[bool, list[Any]]] = {
    "an integer between integers": (
        True,
        [{"type": "integer"}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 2}],
    ),
    "a number between integers": (
        False,
        [{"type": "number"}, {"exclusiveMinimum": 1}, {"exclusiveMaximum": 2}],
    ),
    "integers with limits included": (False, [{"type": "integer", "minimum": 1}, {"maximum": 1}]),
    "limits of which one is excluded": (
        True,
        [{"type": "number", "minimum": 1}, {"maximum": 1}, {"exclusiveMaximum": 1}],
    ),
    "a member forbidden elsewhere": (True, [{"type": "object", **A}, {"properties": {"a": False}}]),
    "a member of a pattern": (
        False,
        [{"type": "object", **A, "patternProperties": {"^a": {}}, "additionalProperties": False}],
    ),
    "a member of a closed object": (True, [{**CLOSED, "properties": {"b": {}}}, A]),
    "an item of a constant": (True, [{"const": [1, "a"]}, {"items": {"type": "integer"}}]),
    "constants of objects": (True, [{"const": {"a": 1}}, {"const": {"a": 1, "b": 1}}]),
    "equal constants": (False, [{"const": {"a": [1]}}, {"enum": [{"a": [1.0]}]}]),
    "true and 1": (True, [{"const": True}, {"const": 1}]),
    "lengths": (True, [{"enum": ["ab", "abc"]}, {"maxLength": 1}]),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_the_values_stay_the_same(name: str) -> None:
    schema = REWRITTEN[name]
    found = rewritten(schema)
    assert "oneOf" not in found
    assert valid(found) == valid(schema)


@pytest.mark.parametrize("name", [one for one in REWRITTEN if one != "nothing is valid"])
def test_llguidance_generates_only_valid_values(name: str) -> None:
    schema = REWRITTEN[name]
    accepted = generated(schema)
    expected = valid(schema)
    assert accepted
    assert all(one in expected for one in accepted)


@pytest.mark.parametrize("name", STAYS)
def test_a_schema_without_a_proof_stays(name: str) -> None:
    assert rewritten(STAYS[name]) == STAYS[name]


@pytest.mark.parametrize("name", ["patterns that overlap", "integer or number", "multiples"])
def test_a_schema_without_a_proof_is_refused_with_the_reason(name: str) -> None:
    with pytest.raises(InvalidRequestError, match="exactly one branch, and the server cannot express this"):
        compile_grammar(schema_grammar(STAYS[name]), LLTokenizer("byte"))
    rule = json.dumps({"grammars": [{"lark_grammar": f"start: {schema_rule(STAYS[name])}"}]})
    with pytest.raises(InvalidRequestError, match="use anyOf"):
        compile_grammar(rule, LLTokenizer("byte"))


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_proofs_of_impossible_schemas(name: str) -> None:
    expected, schemas = IMPOSSIBLE[name]
    assert impossible(Document({}, lambda strings: False), schemas) is expected
    assert not (expected and valid({"allOf": schemas}))


def same_values(seeds: range) -> int:
    """Compares random schemas with what they become. Returns how many changed."""
    changed = 0
    for seed in seeds:
        schema = RandomSchemas(seed).document()
        found = rewritten(schema)
        if "oneOf" not in found:
            changed += 1
            assert valid(found) == valid(schema), (seed, schema)
    return changed


def test_random_schemas_keep_their_values() -> None:
    assert same_values(range(40)) > 10


@pytest.mark.slow
def test_many_random_schemas_keep_their_values() -> None:
    assert same_values(range(40, 1500)) > 500


@pytest.mark.slow
def test_what_is_proven_impossible_has_no_value() -> None:
    proven = 0
    for seed in range(1500):
        schemas = RandomSchemas(seed).document()
        document = Document(schemas, lambda strings: False)
        try:
            none = impossible(document, schemas["oneOf"])
        except GaveUpError:
            continue
        proven += none
        found = {"allOf": schemas["oneOf"], "$defs": schemas["$defs"]}
        assert not (none and valid(found)), (seed, schemas)
    assert proven > 300


@pytest.mark.parametrize(
    "part",
    [
        *({"type": 5}, {"type": [[]]}, {"properties": 5}, {"required": [1]}, {"enum": "a"}, {"items": 3}),
        *(
            {"minimum": "a"},
            {"minimum": math.inf},
            {"maximum": math.nan},
            {"const": math.inf},
            {"const": 10**400},
        ),
        *({"$ref": f"#/oneOf/{'1' * 5000}"}, {"$ref": "#/oneOf/01"}, {"$ref": "#/oneOf/\u0663"}),
        *({"$ref": 5}, {"$ref": "#/nowhere"}, {"allOf": {}}, {"anyOf": [[]]}, {"minLength": -1}),
    ],
    ids=lambda part: str(part)[:20],
)
def test_what_is_no_schema_is_left_to_llguidance(part: dict[str, Any]) -> None:
    text = schema_grammar(
        {"oneOf": [part, {"type": "number", **part}, {"type": "object", "required": ["a"]}]}
    )
    assert text.startswith('{"grammars"')


@pytest.mark.parametrize(
    ("schema", "read"),
    [
        (
            {**DRAFT_7, "anyOf": [{"type": "null"}, {"$ref": "#/definitions/q", "type": "boolean"}]},
            {**DRAFT_7, "anyOf": [{"type": "null"}, {"$ref": "#/definitions/q"}]},
        ),
        ({**DRAFT_4, "type": "string", "const": "a"}, {**DRAFT_4, "type": "string"}),
        ({**DRAFT_7, "const": {"$ref": "x", "const": 1}}, {**DRAFT_7, "const": {"$ref": "x", "const": 1}}),
        ({"$ref": "#/definitions/q", "type": "boolean"}, {"$ref": "#/definitions/q", "type": "boolean"}),
    ],
    ids=["beside a reference", "const in draft 4", "plain values", "2020-12"],
)
def test_llguidance_does_not_read_what_a_draft_ignores(schema: dict[str, Any], read: dict[str, Any]) -> None:
    definitions = {"definitions": {"q": True}}
    assert rewritten({**schema, **definitions}) == {**read, **definitions}


def test_one_of_in_plain_values_and_as_a_name_is_no_keyword() -> None:
    data = {"oneOf": [{"type": "string"}]}
    schema = {"enum": [data], "default": data, "properties": {"oneOf": {"type": "null"}}}
    assert rewritten(schema) == schema


def test_the_cases_of_a_schema_are_limited() -> None:
    branch = {
        "anyOf": [{"properties": {f"{one}": {"pattern": "a"}}, "required": [f"{one}"]} for one in range(60)]
    }
    schema = {"oneOf": [branch, {**branch, "maxItems": 1}]}
    assert rewritten(schema) == schema


def test_the_steps_of_a_document_are_limited() -> None:
    document = Document({}, lambda strings: False)
    document.spend(MAX_STEPS)
    with pytest.raises(GaveUpError):
        document.spend()


def test_few_regular_expressions_are_compared() -> None:
    calls = []

    def no_text(strings: list[dict[str, Any]]) -> bool:
        calls.append(strings)
        return True

    words = [{"type": "string", "pattern": f"^{one}$"} for one in range(30)]
    assert "oneOf" in without_negations({"oneOf": words}, no_text)
    assert len(calls) == MAX_REGEX_PROOFS


@pytest.mark.parametrize("texts", [[""], ["a"], ["a", "ab"], ["ab", "ac", "b"], ["", "a.b", "]^-/", "é"]])
def test_other_texts_are_all_texts_but_some(texts: list[str]) -> None:
    schema = {"type": "string", "pattern": regex_of_other_texts(texts)}
    matcher = compile_grammar(schema_grammar(schema), LLTokenizer("byte"))
    validator = validator_for(schema)(schema)
    for one in {"", "x", "a", "b", "ab", "ac", "abc", "a.b", "axb", "]", "é", *texts}:
        text = json.dumps(one, ensure_ascii=False).encode()
        fresh = matcher.deep_copy()
        accepted = fresh.try_consume_tokens(list(text)) == len(text) and fresh.is_accepting()
        assert accepted is validator.is_valid(one) is (one not in texts), one


def test_other_texts_of_long_lists_have_no_expression() -> None:
    longest = math.isqrt(MAX_SIZE)
    regex = regex_of_other_texts(["x" * longest])
    assert regex is not None
    compile_grammar(schema_grammar({"type": "string", "pattern": regex}), LLTokenizer("byte"))
    assert regex_of_other_texts(["x" * longest, "x" * longest + "y"]) is None
