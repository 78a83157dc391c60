"""Folders that a user names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from disagg.core.errors import ConfigError


def cache_folder(environment: Mapping[str, str]) -> Path:
    """`disagg` in `XDG_CACHE_HOME`, or in `~/.cache` where that is not an absolute path (as XDG wants).

    Raises `RuntimeError` when the user has no home.
    """
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "disagg"


def make_folder(path: Path) -> None:
    """Makes the folder and those above it, unless it is there. Raises `ConfigError` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot make the folder {path}: {exc.strerror}; name another one with --out"
        ) from exc
