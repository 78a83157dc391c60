"""A regular expression of all texts but some. JSON Schema has no other way to exclude a string without `not`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

MAX_SIZE = 20_000
"""Limit of the sum of the squares of the lengths of all excluded texts."""
_ANY = r"[\s\S]"
_SPECIAL = frozenset("^$.|?*+()[]{}-/")
_NOT_EXCLUDED = frozenset('"\\\n')
"""Quotation marks and backslashes, which llguidance 1.9 generates for a class such as `[^x]` that excludes them. Line
ends, because `$` also matches before the last one in Python, where validators run."""


def regex_of_other_texts(texts: Iterable[str]) -> str | None:
    """Returns an expression that matches each text as a whole, unless the text is one of `texts`.

    A text is another one if it is only the beginning of some of `texts`, or differs from all of them after such a
    beginning. Returns None for more texts than `MAX_SIZE` allows, and for texts with `_NOT_EXCLUDED`.
    """
    excluded = set(texts)
    if _NOT_EXCLUDED.intersection("".join(excluded)) or sum(len(one) ** 2 for one in excluded) > MAX_SIZE:
        return None
    following = defaultdict[str, set[str]](set)
    for one in excluded:
        following[one] |= set()
        for end, character in enumerate(one):
            following[one[:end]].add(character)
    options = [_after(one, following[one], one in excluded) for one in sorted(following)]
    return f"^(?:{'|'.join(options)})$"


def _after(beginning: str, following: set[str], excluded: bool) -> str:
    """Returns an expression of a beginning, unless it is excluded, and of the texts that differ after it."""
    characters = "".join(map(_literal, sorted(following)))
    different = f"[^{characters}]{_ANY}*" if characters else f"{_ANY}+"
    return "".join(map(_literal, beginning)) + (different if excluded else f"(?:{different})?")


def _literal(character: str) -> str:
    return f"\\{character}" if character in _SPECIAL else character
