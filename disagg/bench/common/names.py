"""Lists of names in the flags of benchmarks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from disagg.core.errors import ConfigError

Name = TypeVar("Name", bound=str)


def parse_names(flag: str, text: str, known: Sequence[Name]) -> tuple[Name, ...]:
    """Parses a list such as `kill,stop`, whose names must be in `known`. Raises `ConfigError` that names `flag`."""
    names = text.split(",")
    found = tuple(name for name in known if name in names)
    if len(found) != len(names):
        raise ConfigError(f"{flag} {text}: give one or more of {','.join(known)}, each once")
    return found
