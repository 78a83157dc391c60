"""Checks objects against a CustomResourceDefinition's schema as an API server does: defaults, no unknown fields.

CEL rules (`x-kubernetes-validations`) are not evaluated.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import yaml

Schema = dict[str, Any]


class CustomKinds:
    """The schemas of a folder of CustomResourceDefinitions, by API version and kind."""

    def __init__(self, folder: Path) -> None:
        self._schemas: dict[tuple[str, str], Schema] = {}
        for path in sorted(folder.glob("*.yaml")):
            spec = yaml.load(path.read_text(), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))["spec"]
            for version in spec["versions"]:
                key = f"{spec['group']}/{version['name']}", spec["names"]["kind"]
                self._schemas[key] = version["schema"]["openAPIV3Schema"]

    def knows(self, given: dict[str, Any]) -> bool:
        """True when there is a definition of the object's kind."""
        return (given["apiVersion"], given["kind"]) in self._schemas

    def problems(self, given: dict[str, Any]) -> list[str]:
        """What an API server would say; nothing for what it would take. Leaves `given` as it is."""
        schema = self._schemas[given["apiVersion"], given["kind"]]
        # The definition leaves metadata open; an API server checks it by itself.
        filled = {key: value for key, value in copy.deepcopy(given).items() if key != "metadata"}
        _fill_defaults(filled, schema)
        validator = jsonschema.Draft202012Validator(_translated(schema))
        errors = sorted(validator.iter_errors(filled), key=lambda error: error.json_path)
        return [f"{error.json_path}: {error.message[:300]}" for error in errors]


def _fill_defaults(value: Any, schema: Schema) -> None:
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
        for name, inner in value.items():
            of = schema.get("properties", {}).get(name, schema.get("additionalProperties"))
            if isinstance(of, dict):
                _fill_defaults(inner, of)
    elif isinstance(value, list):
        for inner in value:
            _fill_defaults(inner, schema.get("items", {}))


def _translated(schema: Schema) -> Schema:
    """OpenAPI's dialect to JSON schema's; fields that a schema with properties does not name are refused."""
    result = dict(_kept(schema))
    if schema.get("x-kubernetes-int-or-string"):
        result["type"] = ["integer", "string"]
    if schema.get("nullable") and "type" in result:
        result["type"] = [result["type"], "null"]
    if "properties" in schema:
        result["properties"] = {name: _translated(inner) for name, inner in schema["properties"].items()}
        if "additionalProperties" not in schema and not schema.get("x-kubernetes-preserve-unknown-fields"):
            result["additionalProperties"] = False
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            result[key] = _translated(schema[key])
    if "anyOf" in schema and not schema.get("x-kubernetes-int-or-string"):
        result["anyOf"] = [_translated(inner) for inner in schema["anyOf"]]
    return result


def _kept(schema: Schema) -> Iterator[tuple[str, Any]]:
    simple = {"type", "enum", "required", "pattern", "minimum", "maximum", "minItems", "maxItems"}
    simple |= {"minLength", "maxLength", "additionalProperties"}
    return ((key, value) for key, value in schema.items() if key in simple)
