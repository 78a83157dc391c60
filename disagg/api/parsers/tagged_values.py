"""Calls with arguments between tags, where strings have no quotation marks (Qwen 3 Coder, GLM 4.5): the grammar."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

from disagg.api.parsers.call_scanner import CallSyntax, Marker
from disagg.api.parsers.schema_values import referred, types_of
from disagg.core.grammars import schema_rule, text_literal

_NOTES = frozenset(("title", "description", "default", "examples", "deprecated"))
_OBJECT = _NOTES | {
    "type",
    "properties",
    "required",
    "additionalProperties",
    "$schema",
    "$defs",
    "definitions",
}


class Tags(NamedTuple):
    """Texts around the name and the value of an argument."""

    name: str
    value: str
    """Text between name and value."""
    end: str
    """Text after a value that is JSON or one of some texts."""
    forbidden: str
    """Characters that a name cannot have."""

    @property
    def texts(self) -> str:
        """The rule `texts`, of any text and the end of a value. `arguments` and `_value` refer to the rule."""
        return f"texts[suffix={text_literal(self.end.strip())}]: /(?s:.*)/"

    def arguments(self, schema: dict[str, Any]) -> str:
        """Returns the arguments as an expression of the Lark dialect, in the order of the schema's properties.

        Raises ValueError for a schema that no expression ensures.
        """
        _require(schema, _OBJECT)
        properties, required = schema.get("properties") or {}, schema.get("required") or []
        if not isinstance(properties, dict) or not isinstance(required, list):
            raise ValueError("properties is not an object, or required is not a list")
        if schema.get("type") != "object":
            raise ValueError("the type is not object")
        if unknown := [name for name in required if name not in list(properties)]:
            raise ValueError(f"the required argument {unknown[0]!r} is not one of the properties")
        found = []
        for name, one in properties.items():
            if name != name.strip() or set(name) & set(self.forbidden):
                raise ValueError(f"the name {name!r} has characters that a call cannot have")
            head = text_literal(f"{self.name}{name}{self.value}")
            argument = f"{head} {self._value(schema, one)} SPACE"
            found.append(argument if name in required else f"({argument})?")
        return " ".join(found) or '""'

    def _value(self, root: dict[str, Any], given: object) -> str:
        """Returns a value and its end. The value has the form that `typed_value` reads."""
        if isinstance(given, dict) and "$ref" in given:
            _require(given, _NOTES | {"$ref"})
        schema = referred(root, given)
        if not isinstance(schema, dict):
            raise ValueError("a schema is not an object, or its $ref leads nowhere")
        types = types_of(schema)
        if types and "string" not in types:
            definitions = {name: one for name, one in root.items() if name in ("$defs", "definitions")}
            return f"{schema_rule({**schema, **definitions})} {text_literal(self.end)}"
        if "const" in schema or "enum" in schema:
            _require(schema, _NOTES | {"type", "const", "enum"})
            values = [schema["const"]] if "const" in schema else schema["enum"]
            if not isinstance(values, list) or not values or not all(isinstance(one, str) for one in values):
                raise ValueError("enum and const beside strings must be strings")
            return "(" + " | ".join(text_literal(one + self.end) for one in values) + ")"
        keyword = next((name for name in ("type", "anyOf", "oneOf") if name in schema), "type")
        _require(schema, _NOTES | {keyword})
        for one in schema[keyword] if keyword != "type" else ():
            if not (types := types_of(one)) or "string" in types:
                _require(one, _NOTES | {"type"})
        return "texts"


class TaggedCalls(CallSyntax):
    """Calls with arguments between tags."""

    tags: ClassVar[Tags]
    has_rules: ClassVar[bool] = True

    def arguments(self, schema: dict[str, Any]) -> str:
        return self.tags.arguments(schema)

    def calls(self, tools: Mapping[str, str], marker: Marker, *, parallel: bool) -> list[str]:
        return [*super().calls(tools, marker, parallel=parallel), self.tags.texts]


def _require(schema: object, known: frozenset[str]) -> None:
    """Raises ValueError unless `schema` is an object with keywords of `known` only."""
    if not isinstance(schema, dict):
        raise ValueError("a schema is not an object")
    for name in schema:
        if name not in known:
            raise ValueError(f"the keyword {name} is not supported there")
