"""A client's API key, from a file that a user names."""

from __future__ import annotations

from pathlib import Path

from disagg.core.errors import ConfigError


def first_key(flag: str, path: Path) -> str:
    """The first line of `path`. Raises `ConfigError`, naming `flag`, unless it is a key that a header can carry."""
    try:
        text = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{flag} {path} cannot be read: {exc}") from exc
    key = text.splitlines()[0].strip() if text else ""
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{flag} {path}: its first line is the key, in printable ASCII characters")
    return key
