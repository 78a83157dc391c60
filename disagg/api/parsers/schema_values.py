"""Converts arguments that models write without quotation marks; the tool's schema determines which are texts."""

from __future__ import annotations

from typing import Any

from disagg.api.parsers.texts import load_json


def typed_value(text: str, schema: object) -> Any:
    """Returns an argument's value: a text, unless the parameter's schema allows no text."""
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
