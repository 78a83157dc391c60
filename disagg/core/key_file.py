"""Reads a client's API key from a file."""

from __future__ import annotations

from pathlib import Path

from disagg.core.errors import ConfigError


def first_key(flag: str, path: Path) -> str:
    """Returns the first line of `path`. Raises `ConfigError`, naming `flag`, if the line is no valid header value."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag} {path} cannot be read: {exc}") from exc
    key = text.splitlines()[0].strip() if text else ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{flag} {path}: its first line must be the key, in printable ASCII characters")
    return key
