"""What is known about the value at a place in a JSON schema."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from disagg.core.json_schema.document import Document, Schema, properties
from disagg.core.json_schema.impossible import impossible


@dataclass(frozen=True)
class Context:
    """A place in a document: the value there satisfies all schemas of `known`.

    `path`: names of members from the value of `outer` to the place.
    """

    document: Document
    outer: tuple[Schema, ...]
    known: tuple[Schema, ...]
    path: tuple[str, ...] = ()
    depth: int = 0

    def excludes(self, schema: Schema) -> bool:
        """Whether a proof shows that no value at this place satisfies a schema."""
        for name in reversed(self.path):
            schema = {"type": "object", "required": [name], "properties": {name: schema}}
        return impossible(self.document, [*self.outer, schema])

    def facts(self) -> Iterator[dict[str, Any]]:
        """Yields each known schema, with the schemas of which it consists."""
        for one in self.known:
            yield from self.document.conjuncts(one)

    def implies(self, schema: Schema) -> bool:
        """Whether a schema is one of the known ones."""
        text = self.document.text
        return any(text(one) == text(schema) for one in self.facts())

    def member(self, name: str) -> Context:
        """Returns the context of the value of a member."""
        known = tuple(properties(one)[name] for one in self.facts() if name in properties(one))
        return replace(self, known=known, path=(*self.path, name), depth=self.depth + 1)

    def names(self) -> set[str] | None:
        """Returns names that contain those of all members; None if any name is possible."""
        for one in self.facts():
            if one.get("additionalProperties") is False and "patternProperties" not in one:
                return set(properties(one))
        return None

    def deeper(self) -> Context:
        """Returns the same place, for a schema within a schema."""
        return replace(self, depth=self.depth + 1)
