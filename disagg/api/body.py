"""Decodes request bodies to structs; each error is a 400 that names the field."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from disagg.api.errors import ApiError, bad

T = TypeVar("T", bound=msgspec.Struct)
_WHERE = re.compile(r"(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>.*)`)?", re.DOTALL)


def decode_object(body: bytes) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises a 400."""
    try:
        values = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise bad(None, f"the body is not JSON: {exc}", "invalid_json") from exc
    if not isinstance(values, dict):
        raise bad(None, "the body must be a JSON object")
    return values


def to_struct(values: Mapping[str, Any], cls: type[T], off: Mapping[str, tuple[Any, ...]], at: str = "") -> T:
    """Converts `values` to `cls`; null means absent. Raises a 400 that names the field, with the prefix `at`.

    `off`: unsupported fields, which are ignored if they have one of the listed values.
    """
    given = {name: value for name, value in values.items() if value is not None}
    known = cls.__struct_encode_fields__
    tag = cls.__struct_config__.tag_field
    for name in [name for name in given if name not in known and name != tag]:
        path = f"{at}{name}"
        if name not in off:
            raise bad(path, f"unknown field {path}", "unknown_field")
        if not any(type(given[name]) is type(value) and given[name] == value for value in off[name]):
            raise bad(path, f"{path} is not supported by this server", "unsupported_field")
        del given[name]
    try:
        return msgspec.convert(given, cls)
    except msgspec.ValidationError as exc:
        raise _refusal(exc, at) from exc


def check_number(name: str, value: float, low: float, high: float) -> None:
    """Raises a 400 unless `low <= value <= high`."""
    if not low <= value <= high:
        raise bad(name, f"{name} = {value!r} is not allowed; it must be from {low} to {high}")


def _refusal(exc: msgspec.ValidationError, at: str) -> ApiError:
    found = _WHERE.fullmatch(str(exc))
    assert found is not None, "the pattern matches everything"
    what, path = found["what"], found["path"] or ""
    missing = re.search(r"required field `(.+)`", what)
    path = f"{at}{path}" + ("." * bool(path) + missing[1] if missing else "")
    return bad(path or None, f"{path or 'the body'}: {what.replace('`', '')}")
