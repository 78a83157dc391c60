"""Converts tool arguments that a model writes without quotation marks; the tool's schema decides which are
strings."""

from __future__ import annotations

from typing import Any

from disagg.api.parsers.texts import load_json


def typed_value(text: str, schema: object) -> Any:
    """Returns an argument's value: parsed as JSON if the parameter's schema excludes strings, else the text
    itself."""
    types = types_of(schema)
    if not types or "string" in types:
        return None if text == "null" and "null" in types else text
    try:
        return load_json(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def referred(root: object, schema: object) -> object:
    """Returns the schema to which the `$ref` of `schema` refers, within `root`; `schema` itself without one."""
    for _ in range(8):
        ref = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(ref, str) or not ref.startswith("#/"):
            break
        schema = root
        for name in ref[2:].split("/"):
            schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def types_of(schema: object) -> set[str]:
    """Returns the names of the types that a schema allows; empty if the schema does not list them."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {one for one in (given if isinstance(given, list) else [given]) if isinstance(one, str)}
    for name in ("anyOf", "oneOf"):
        given = schema.get(name)
        for one in given if isinstance(given, list) else ():
            types |= types_of(one)
    return types
