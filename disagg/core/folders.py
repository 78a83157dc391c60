"""Output folders, private temporary folders, and atomic writes of files."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from disagg.core.errors import ConfigError

_BASE_BYTES = 20
"""Longest path of a base folder, in bytes: the paths of Ray's sockets below it must fit a unix socket's limit."""


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Returns the cache folder: `disagg` in `XDG_CACHE_HOME` if that is an absolute path, else in `~/.cache`.

    Raises `RuntimeError` if the user has no home folder.
    """
    named = Path(environment.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "disagg"


def make_folder(path: Path) -> None:
    """Creates the folder and its parents if missing. Raises `ConfigError` if the folder is not writable."""
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
    """Converts an `OSError` of the block, which writes `path`, to a `ConfigError` that names `flag`."""
    try:
        yield
    except OSError as exc:
        raise ConfigError(
            f"{flag} {path}: cannot be written: {exc.strerror or exc}; free some space, or choose another path"
        ) from exc


def private_folder(name: str) -> Path:
    """Creates a temporary folder that only this user can enter; the caller removes the folder.

    The folder is in `/tmp` if the path of `TMPDIR` is long: a unix socket's path has at most 107 bytes. Raises
    `ConfigError` if no folder can be created.
    """
    usual = tempfile.gettempdir()
    base = usual if len(os.fsencode(usual)) <= _BASE_BYTES else "/tmp"
    try:
        return Path(tempfile.mkdtemp(prefix=f"disagg-{name}-", dir=base))  # mode 0700
    except OSError as exc:
        raise ConfigError(
            f"cannot make a folder for temporary files in {base}: {exc.strerror}; set TMPDIR to a writable folder"
        ) from exc


def replace_file(path: Path, body: bytes, mode: int = 0o600, *, durable: bool = False) -> None:
    """Writes or replaces a file atomically: a reader sees the old or the new content, never a part.

    `durable`: whether to sync the content to disk before the replacement. On an `OSError` the old file stays.
    """
    with _written_beside(path, body, mode, durable) as new:
        new.replace(path)


def create_file(path: Path, body: bytes, mode: int = 0o600) -> None:
    """Writes a new file atomically. Raises `FileExistsError` if `path` exists, or another `OSError`."""
    with _written_beside(path, body, mode, durable=False) as new:
        path.hardlink_to(new)


@contextmanager
def _written_beside(path: Path, body: bytes, mode: int, durable: bool) -> Iterator[Path]:
    """Writes a temporary file in the folder of `path`; removes the file after the block unless the block renamed
    it."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    new = Path(name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, mode)
            file.write(body)
            file.flush()
            if durable:
                os.fsync(descriptor)
        yield new
    finally:
        with suppress(OSError):  # an error of the block must be raised instead
            new.unlink(missing_ok=True)
