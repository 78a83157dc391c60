"""The values that a JSON schema excludes, as schemas without `not`, which llguidance does not support.

`remainder` is exact: within a context, the union of its schemas is the complement of a schema. It returns None if
there is no such union without `not` and `contains`, or if the complement of a keyword is not computed here. Proofs
make unions small.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from disagg.core.json_schema.context import Context
from disagg.core.json_schema.document import MISSING, Schema, members, pointed, properties
from disagg.core.json_schema.facts import FRACTION, KINDS, KINDS_OF_TYPE, kinds_of
from disagg.core.json_schema.other_values import (
    Rule,
    Union,
    count_rule,
    exclusive_rule,
    limit_rule,
    other_values,
    types_of,
    union_of,
)

ALL: Union = [True]
_OTHER_KEYWORDS = {
    "string": "contentSchema format pattern",
    "number": "divisibleBy multipleOf",
    "array": "additionalItems contains maxContains minContains prefixItems unevaluatedItems uniqueItems",
    "object": "dependencies dependentRequired dependentSchemas maxProperties minProperties patternProperties "
    "propertyNames unevaluatedProperties",
    "": "$dynamicAnchor $dynamicRef $recursiveAnchor $recursiveRef disallow else extends if then",
}
"""Keywords of all drafts whose complement is not computed here, by the type of values that they may restrict."""
_TYPE_OF_KEYWORD = {
    keyword: name for name, keywords in _OTHER_KEYWORDS.items() for keyword in keywords.split()
}
_MAX_DEPTH = 12


def remainder(context: Context, schema: Schema) -> Union | None:
    """Returns the values of a context that do not satisfy a schema.

    Raises `GaveUpError` if the effort is too large.
    """
    context.document.spend()
    if isinstance(schema, bool):
        return [] if schema else ALL
    if not isinstance(schema, dict) or context.depth > _MAX_DEPTH:
        return None
    if context.implies(schema):
        return []
    if context.excludes(schema):
        return ALL
    if "$ref" in schema and len(schema) > 1 and not context.document.dialect.ref_siblings:
        return None
    found = union_of(_of_keyword(context, schema, keyword) for keyword in schema)
    return None if found is None else _merged([one for one in found if not context.excludes(one)])


def _merged(union: Union) -> Union:
    """Returns a union in which "without a member" and "with a member that fits a schema" are one schema each.

    llguidance combines the schemas of unions that hold together, so that each one counts.
    """
    found = list(union)
    for one in union:
        names = list(properties(one)) if isinstance(one, dict) else []
        if len(names) == 1 and one == _absent(names[0]):
            present = {"type": "object", "required": names}
            for other in union:
                if other == present or other == {
                    **present,
                    "properties": {names[0]: _member(other, names[0])},
                }:
                    rest = {key: value for key, value in other.items() if key != "required"}
                    found = [rest if kept is other else kept for kept in found if kept is not one]
    return found


def _member(schema: Schema, name: str) -> Schema:
    """Returns the schema of a member in `properties`."""
    return properties(schema).get(name) if isinstance(schema, dict) else None


def _absent(name: str) -> dict[str, Any]:
    """Returns the objects without a member."""
    return {"type": "object", "properties": {name: False}}


def joined(union: Union) -> Schema:
    """Returns a union as one schema."""
    return union[0] if len(union) == 1 else {"anyOf": union or [False]}


def _of_keyword(context: Context, schema: dict[str, Any], keyword: str) -> Union | None:
    """Returns the values that violate a keyword."""
    if (name := _TYPE_OF_KEYWORD.get(keyword)) is not None:
        return [] if name and context.excludes({"type": name}) else None
    rule = _RULES.get(keyword)
    return rule(context, schema) if rule else []


def _ref(context: Context, schema: dict[str, Any]) -> Union | None:
    target = pointed(context.document.root, schema["$ref"])
    return None if target is MISSING else remainder(context.deeper(), target)


def _all_of(context: Context, schema: dict[str, Any]) -> Union | None:
    return union_of(remainder(context.deeper(), one) for one in members(schema, "allOf"))


def _any_of(context: Context, schema: dict[str, Any]) -> Union | None:
    return _of_none(context, members(schema, "anyOf"))


def _not(context: Context, schema: dict[str, Any]) -> Union | None:
    return [schema["not"]]


def _one_of(context: Context, schema: dict[str, Any]) -> Union | None:
    branches = members(schema, "oneOf")
    for index, one in enumerate(branches):
        if not all(context.excludes({"allOf": [one, other]}) for other in branches[:index]):
            return None
    return _of_none(context, branches)


def _of_none(context: Context, branches: Sequence[Schema]) -> Union | None:
    """Returns the values that satisfy none of some schemas."""
    found: Union = []
    for one in branches:
        part = remainder(context.deeper(), one)
        if part is None or not part:
            return part
        if part != ALL:
            found.append(joined(part))
    return [{"allOf": found}] if len(found) > 1 else found or ALL


def _type(context: Context, schema: dict[str, Any]) -> Union | None:
    names = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    if not all(isinstance(one, str) and one in KINDS_OF_TYPE for one in names):
        return None
    others = KINDS - kinds_of(schema)
    if FRACTION in others and "integer" not in others:
        if not context.excludes({"type": FRACTION}):
            return None
        others -= {FRACTION}
    return types_of(others)


def _required(context: Context, schema: dict[str, Any]) -> Union | None:
    names = schema["required"]
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        return None
    return [_absent(one) for one in names]


def _properties(context: Context, schema: dict[str, Any]) -> Union | None:
    return union_of(_without(context, name, one) for name, one in properties(schema).items())


def _without(context: Context, name: str, schema: Schema) -> Union | None:
    """Returns the objects that have a member, and whose member does not satisfy a schema."""
    part = remainder(context.member(name), schema)
    if not part:
        return part
    present = {"type": "object", "required": [name]}
    return [present if part == ALL else {**present, "properties": {name: joined(part)}}]


def _additional_properties(context: Context, schema: dict[str, Any]) -> Union | None:
    if schema["additionalProperties"] in (True, {}):
        return []
    names = context.names()
    if schema["additionalProperties"] is not False or "patternProperties" in schema or names is None:
        return None
    return [{"type": "object", "required": [one]} for one in sorted(names - set(properties(schema)))]


def _items(context: Context, schema: dict[str, Any]) -> Union | None:
    items, text = schema["items"], context.document.text
    if not isinstance(items, dict | bool):
        return None
    known = (one["items"] for one in context.facts() if "items" in one and "prefixItems" not in one)
    if items in (True, {}) or any(text(one) == text(items) for one in known):
        return []
    some = {"type": "array", "minItems": 1}
    return [some] if context.excludes({**some, "items": items}) else None


def _enum(context: Context, schema: dict[str, Any]) -> Union | None:
    return other_values(context, schema["enum"]) if isinstance(schema["enum"], list) else None


def _const(context: Context, schema: dict[str, Any]) -> Union | None:
    return other_values(context, [schema["const"]]) if context.document.dialect.const else None


_RULES: dict[str, Rule] = {
    "$ref": _ref,
    "allOf": _all_of,
    "anyOf": _any_of,
    "oneOf": _one_of,
    "not": _not,
    "type": _type,
    "enum": _enum,
    "const": _const,
    "required": _required,
    "properties": _properties,
    "additionalProperties": _additional_properties,
    "items": _items,
    "minItems": count_rule("minItems", "array", "maxItems", -1),
    "maxItems": count_rule("maxItems", "array", "minItems", 1),
    "minLength": count_rule("minLength", "string", "maxLength", -1),
    "maxLength": count_rule("maxLength", "string", "minLength", 1),
    "minimum": limit_rule("minimum"),
    "maximum": limit_rule("maximum"),
    "exclusiveMinimum": exclusive_rule("exclusiveMinimum"),
    "exclusiveMaximum": exclusive_rule("exclusiveMaximum"),
}
