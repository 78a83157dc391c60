"""A JSON schema as a document: its dialect, its references, and the effort that proofs about it may take."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import unquote

Schema = Any
"""A schema as JSON: an object, true or false."""
NoText = Callable[[list[dict[str, Any]]], bool]
"""Whether no text satisfies all of some schemas of strings; False if unknown."""
MISSING = object()
"""Returned for a reference that leads nowhere."""
MAX_STEPS = 6_000
"""Effort that all proofs about one document may take: schemas read plus pairs of cases combined."""
VALUES_OF_STEP = 32
"""Values of an `enum` that a proof reads in the time of a step."""
MAX_REGEX_PROOFS = 12
"""Limit of the proofs about one document that compare regular expressions; each takes some milliseconds."""
_SCHEMAS_BY_NAME = frozenset(
    ("$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties")
)
"""Keywords whose values are schemas by name; a name can be that of a keyword."""
_PLAIN_VALUES = frozenset(("const", "default", "enum", "examples"))
"""Keywords whose values are no schemas."""

_INDEX = re.compile(r"0|[1-9][0-9]{0,8}")
"""An index of a list in a `$ref`."""
_BESIDE_REF = frozenset(("$defs", "$id", "$ref", "$schema", "definitions", "id"))
"""Keywords beside `$ref` to which references may lead, or that name the schema."""
_LIMITS = frozenset(("const", "enum", "exclusiveMaximum", "exclusiveMinimum", "maximum", "minimum"))


class GaveUpError(Exception):
    """A proof took more effort than a document may take."""


class Dialect(NamedTuple):
    """What a draft of JSON Schema means by keywords that differ between drafts."""

    const: bool = True
    """Whether `const` exists."""
    numeric_exclusive: bool = True
    """Whether `exclusiveMinimum` and `exclusiveMaximum` are numbers."""
    boolean_exclusive: bool = False
    """Whether they are booleans beside `minimum` and `maximum`."""
    ref_siblings: bool = True
    """Whether keywords beside `$ref` apply."""
    dependencies: bool = False
    """Whether `dependencies` exist, not `dependentRequired` and `dependentSchemas`."""
    conditions: bool = True
    """Whether `if` exists."""
    names: bool = True
    """Whether `propertyNames` exist."""
    known: bool = True


_DIALECTS = {
    "http://json-schema.org/draft-04/schema": Dialect(
        False, False, True, False, dependencies=True, conditions=False, names=False
    ),
    "http://json-schema.org/draft-06/schema": Dialect(
        ref_siblings=False, dependencies=True, conditions=False
    ),
    "http://json-schema.org/draft-07/schema": Dialect(ref_siblings=False, dependencies=True),
    "https://json-schema.org/draft/2019-09/schema": Dialect(),
    "https://json-schema.org/draft/2020-12/schema": Dialect(),
}
_UNKNOWN = Dialect(const=False, numeric_exclusive=False, ref_siblings=False, known=False)
"""Proofs use only keywords on which all drafts agree."""


def dialect_of(root: dict[str, Any]) -> Dialect:
    """Returns the dialect that a schema names, by default that of 2020-12."""
    name = root.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    return _DIALECTS.get(name.rstrip("#"), _UNKNOWN) if isinstance(name, str) else _UNKNOWN


def without_ignored(root: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema without the keywords that its draft ignores, and that llguidance would apply: those beside
    `$ref` up to draft 7, and `const` in draft 4."""
    dialect = dialect_of(root)
    if not dialect.known or dialect.ref_siblings:
        return root

    def applied(schema: dict[str, Any]) -> dict[str, Any]:
        if "$ref" in schema:
            return {key: one for key, one in schema.items() if key in _BESIDE_REF}
        return {key: one for key, one in schema.items() if dialect.const or key != "const"}

    found: dict[str, Any] = changed(root, applied)
    return found


class Document:
    """A whole schema, within which references are resolved."""

    def __init__(self, root: dict[str, Any], no_text: NoText) -> None:
        self.root = root
        self.dialect = dialect_of(root)
        self._no_text = no_text
        self._regex_proofs: dict[str, bool] = {}
        self._texts: dict[int, tuple[Schema, str]] = {}
        self._steps = 0
        self._fractions: bool | None = None

    def spend(self, steps: int = 1) -> None:
        """Counts steps of a proof. Raises `GaveUpError` after `MAX_STEPS`."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise GaveUpError

    def has_fractions(self) -> bool:
        """Whether a limit of numbers, or a value of `enum` or `const`, is not an integer."""
        if self._fractions is None:
            self._fractions = any(_fractions_in(self.root))
        return self._fractions

    def no_text(self, strings: list[dict[str, Any]]) -> bool:
        """Whether no text satisfies all of some schemas of strings. False if unknown."""
        key = canonical(strings)
        if key not in self._regex_proofs:
            if len(self._regex_proofs) == MAX_REGEX_PROOFS:
                return False
            self._regex_proofs[key] = self._no_text(strings)
        return self._regex_proofs[key]

    def text(self, schema: Schema) -> str:
        """Returns `canonical(schema)`. Each object is converted once; the object must not change afterwards."""
        kept = self._texts.get(id(schema))
        if kept is None:  # the reference to the object keeps its id unique
            kept = self._texts[id(schema)] = (schema, canonical(schema))
        return kept[1]

    def conjuncts(self, schema: Schema, depth: int = 0) -> Iterator[dict[str, Any]]:
        """Yields schemas that are objects and hold for each value of a schema: itself, targets of `$ref`, `allOf`."""
        if not isinstance(schema, dict) or depth > 8:
            return
        self.spend()
        yield from self.conjuncts(pointed(self.root, schema.get("$ref")), depth + 1)
        if "$ref" not in schema or self.dialect.ref_siblings or len(schema) == 1:
            yield schema
            for one in members(schema, "allOf"):
                yield from self.conjuncts(one, depth + 1)


def pointed(root: object, ref: object) -> object:
    """Returns the part of `root` to which a `$ref` within the document refers (`#`, `#/$defs/x`), or `MISSING`."""
    if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
        return MISSING
    found = root
    for segment in ref.split("/")[1:]:
        name = unquote(segment).replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and _INDEX.fullmatch(name) and int(name) < len(found):
            found = found[int(name)]
        else:
            return MISSING
    return found


def _fractions_in(value: Any, is_limit: bool = False) -> Iterator[bool]:
    """Yields True for each number in the limits and values of a schema that is not an integer."""
    if isinstance(value, float):
        yield is_limit and not value.is_integer()
    for key, one in value.items() if isinstance(value, dict) else ():
        yield from _fractions_in(one, is_limit or key in _LIMITS)
    for one in value if isinstance(value, list) else ():
        yield from _fractions_in(one, is_limit)


def changed(value: Any, change: Callable[[dict[str, Any]], dict[str, Any]], keyword: str = "") -> Any:
    """Returns a schema in which `change` has replaced each schema that is an object, inner schemas first.

    `keyword`: the key of `value` in the schema around it.
    """
    if isinstance(value, list):
        return [changed(one, change) for one in value]
    if not isinstance(value, dict):
        return value
    if keyword in _SCHEMAS_BY_NAME:
        return {name: changed(one, change) for name, one in value.items()}
    return change(
        {key: one if key in _PLAIN_VALUES else changed(one, change, key) for key, one in value.items()}
    )


def canonical(value: Any) -> str:
    """Returns a text that is equal for equal JSON values; 1 and 1.0 count as different."""
    return json.dumps(value, sort_keys=True)


def members(schema: dict[str, Any], keyword: str) -> list[Schema]:
    """Returns the list of schemas that a keyword has; an empty list without one."""
    found = schema.get(keyword)
    return found if isinstance(found, list) else []


def properties(schema: dict[str, Any]) -> dict[str, Schema]:
    """Returns the schemas by name that `properties` has."""
    found = schema.get("properties")
    return found if isinstance(found, dict) else {}
