"""Rewrites `oneOf` as `anyOf`, and `not` as the values that it leaves.

llguidance supports neither branches of `oneOf` that overlap nor `not`.

A value of `oneOf` satisfies exactly one branch. Each branch becomes the branch without the values of the others
(`remainder`); where a proof shows that two branches have no value in common, nothing changes in them. `not` becomes
the values that its schema excludes. The result has exactly the values of the original schema. A keyword stays where
no proof is found, or no exact union.
"""

from __future__ import annotations

import re
from typing import Any

from disagg.core.json_schema.context import Context
from disagg.core.json_schema.document import (
    Document,
    GaveUpError,
    NoText,
    Schema,
    changed,
    members,
)
from disagg.core.json_schema.other_values import Union
from disagg.core.json_schema.remainder import ALL, joined, remainder

_BRANCH = re.compile(r"/(?:oneOf/\d|not(?:/|$))")
"""A reference into a branch of `oneOf`, or into `not`."""


def without_negations(schema: dict[str, Any], no_text: NoText) -> dict[str, Any]:
    """Returns a schema of the same values, in which other keywords replace each `oneOf` and `not` for which this is
    proven.

    `no_text`: compares regular expressions. A schema in which `$ref` may mean another document, or leads into a
    branch of `oneOf` or into `not`, stays as it is.
    """
    if not _is_one_document(schema):
        return schema
    document = Document(schema, no_text)
    rewritten: dict[str, Any] = changed(schema, lambda one: _rewritten(document, _without_not(document, one)))
    return rewritten


def _is_one_document(root: dict[str, Any]) -> bool:
    """Whether a schema has `oneOf` or `not`, each `$ref` refers to the root, and no `$ref` leads into a branch."""
    found = False
    rest: list[Any] = [root]
    while rest:
        one = rest.pop()
        for key, value in one.items() if isinstance(one, dict) else enumerate(one):
            found = found or key in ("not", "oneOf")
            if isinstance(value, dict | list):
                rest.append(value)
            elif isinstance(value, str) and (
                (key == "$ref" and _BRANCH.search(value))
                or (key in ("$id", "id") and one is not root and not value.startswith("#"))
                or (key == "$schema" and value.rstrip("#") != str(root.get("$schema")).rstrip("#"))
            ):
                return False
    return found


def _without_not(document: Document, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns an equivalent schema without `not`. Returns the schema itself if the values that `not` leaves are not
    found as a union."""
    if not isinstance(schema.get("not"), dict | bool):
        return schema
    beside = {key: one for key, one in schema.items() if key != "not"}
    try:
        left = remainder(Context(document, (beside,), (beside,)), schema["not"])
    except GaveUpError:
        return schema
    if left is None:
        return schema
    return beside if left == ALL else {**beside, "allOf": [*members(beside, "allOf"), joined(left)]}


def _rewritten(document: Document, schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a schema with an equivalent `anyOf` in the place of its `oneOf`. Returns the schema itself if no such
    `anyOf` is found."""
    branches = schema.get("oneOf")
    if not isinstance(branches, list) or not branches:
        return schema
    beside = {key: one for key, one in schema.items() if key != "oneOf"}
    try:
        found = _exclusive(document, beside, branches)
    except GaveUpError:
        return schema
    if found is None:
        return schema
    if "anyOf" in schema:
        return {**beside, "allOf": [*members(schema, "allOf"), {"anyOf": found}]}
    return {
        "anyOf" if key == "oneOf" else key: found if key == "oneOf" else one for key, one in schema.items()
    }


def _exclusive(document: Document, beside: dict[str, Any], branches: list[Schema]) -> list[Schema] | None:
    """Returns `branches`, changed so that each value of `beside` satisfies at most one of them; None if no such
    branches are found."""
    apart: set[tuple[int, int]] = set()
    found: list[Schema] = []
    for index, branch in enumerate(branches):
        context = Context(document, (beside, branch), (beside, branch))
        parts: list[Union] = []
        for other, excluded in enumerate(branches):
            if other == index or (other, index) in apart:
                continue
            part = remainder(context, excluded)
            if part is None:
                return None
            if part == ALL:
                apart.add((index, other))
            else:
                parts.append(part)
        if all(parts):
            found.append({"allOf": [branch, *map(joined, parts)]} if parts else branch)
    return found or [False]
