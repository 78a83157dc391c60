"""Folders and files that a user names for output, and private folders for temporary files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from disagg.core.errors import ConfigError

_BASE_BYTES = 20
"""The longest path of a folder in which Ray's sockets, the longest of all, still have paths that can be bound."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """`disagg` in `XDG_CACHE_HOME`, or in `~/.cache` where that is not an absolute path (as XDG wants).

    Raises `RuntimeError` when the user has no home.
    """
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "disagg"


def make_folder(path: Path) -> None:
    """Makes the folder and those above it, unless it is there. Raises `ConfigError` if it takes no files."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(
            f"cannot make the folder {path}: {exc.strerror}; name another one with --out"
        ) from exc
    if not os.access(path, os.W_OK | os.X_OK):
        raise ConfigError(f"cannot write into the folder {path}: name another one with --out")


@contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Within the block a file that the user named with `flag` is written: a full disk, say, is one `ConfigError`."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{flag} {path}: cannot be written: {exc.strerror or exc}; free some space, or name another place"
        ) from exc


def private_folder(name: str) -> Path:
    """A new folder for temporary files that only this user can enter; the caller removes it.

    Its path leaves room for a unix socket's name, which ends after 107 bytes: it lies in `/tmp` when the usual folder
    (`TMPDIR`) has a long path. Raises `ConfigError` where no folder can be made.
    """
    usual = tempfile.gettempdir()
    base = usual if len(os.fsencode(usual)) <= _BASE_BYTES else "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=f"disagg-{name}-", dir=base))  # mode 0700
    except OSError as exc:
        raise ConfigError(
            f"cannot make a folder for temporary files in {base}: {exc.strerror}; set TMPDIR to one that is writable"
        ) from exc
