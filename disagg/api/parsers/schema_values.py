"""Converts tool arguments that a model writes without quotation marks; the tool's schema decides which are
strings."""

from __future__ import annotations

from typing import Any

from disagg.api.parsers.texts import load_json


def typed_value(text: str, schema: object) -> Any:
    """Returns an argument's value: parsed as JSON if the parameter's schema excludes strings, else the text
    itself."""
    types = _types(schema)
    if not types or "string" in types:
        return None if text == "null" and "null" in types else text
    try:
        return load_json(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def _types(schema: object) -> set[str]:
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given) if isinstance(given, list) else set()
    for name in ("anyOf", "oneOf"):
        for one in schema.get(name) or ():
            types |= _types(one)
    return types
