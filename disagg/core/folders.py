"""Folders that a user names."""

from __future__ import annotations

from pathlib import Path

from disagg.core.errors import ConfigError


def make_folder(path: Path) -> None:
    """Makes the folder and those above it, unless it is there. Raises `ConfigError` where that cannot be."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot make the folder {path}: {exc.strerror}; name another one with --out"
        ) from exc
