"""The key file: a `KeySet` as JSON, readable by its owner only.

The four keys of the current generation are at the top level. During a rotation, the top level also has `next` and
`next_from_unix_s`. Changes replace the file atomically.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.folders import replace_file
from transport.keys.curve import ControlKeys, KeySet, make_keys


def load_keys(path: str | Path) -> KeySet:
    """Reads a key file. Raises `ConfigError` when the file is missing, readable by others, or broken."""
    try:
        with Path(path).open("rb") as file:
            found = os.fstat(file.fileno())
            _check_mode(path, found)
            text = file.read()
    except OSError as exc:
        raise ConfigError(
            f"cannot read the key file {path}: {exc.strerror}; make one with `disagg keys`"
        ) from exc
    try:
        return _decode(text)
    except (msgspec.DecodeError, ConfigError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} is not a key file: {exc}; make one with `disagg keys`") from exc


def save_keys(keys: ControlKeys | KeySet, path: str | Path) -> None:
    """Writes a new key file with mode 0600. Raises `ConfigError` when the file exists or cannot be written."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        raise ConfigError(
            f"{path} exists already; rotate its keys with `disagg keys --rotate`, or remove it"
        ) from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    with os.fdopen(descriptor, "wb") as file:
        file.write(_encode(keys if isinstance(keys, KeySet) else KeySet(keys)))


def replace_keys(keys: KeySet, path: str | Path) -> None:
    """Writes or replaces a key file atomically, with mode 0600. Raises `ConfigError` when the write fails."""
    target = Path(path).resolve()  # keeps a symbolic link
    try:
        replace_file(target, _encode(keys), 0o600, durable=True)
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc


def rotate_keys(path: str | Path, grace_s: float, now_unix_s: float | None = None) -> KeySet:
    """Adds a new generation, which channels present after `grace_s`; drops the previous generation, if any.

    Returns the file's new content. Raises `ConfigError` for a file that cannot be read or written, or if the earlier
    rotation has not taken effect yet.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    with _locked(path):
        keys = load_keys(path)
        if keys.next is not None and not keys.is_rotated(now):
            raise ConfigError(
                f"{path}: a rotation takes effect in {keys.next_from_unix_s - now:.0f} s; rotate again afterwards"
            )
        rotated = KeySet(keys.next or keys.current, make_keys(), now + grace_s)
        replace_keys(rotated, path)
    return rotated


def retire_keys(path: str | Path, now_unix_s: float | None = None) -> KeySet:
    """Drops the previous generation after a rotation. Returns the file's new content.

    Raises `ConfigError` for a file that cannot be read or written, and when there is no previous generation.
    """
    now = time.time() if now_unix_s is None else now_unix_s
    with _locked(path):
        keys = load_keys(path)
        if keys.next is None:
            raise ConfigError(
                f"{path} holds one generation: there is none to retire before `disagg keys --rotate`"
            )
        if not keys.is_rotated(now):
            raise ConfigError(
                f"{path}: the next generation is presented in {keys.next_from_unix_s - now:.0f} s; retire the "
                f"present one afterwards"
            )
        retired = KeySet(keys.next)
        replace_keys(retired, path)
    return retired


def _check_mode(path: str | Path, found: os.stat_result) -> None:
    """Raises `ConfigError` unless only the owner has access. A file owned by root may be readable by its group,
    because mounted Kubernetes Secrets are."""
    shared_by_root = found.st_uid == 0 and os.geteuid() != 0
    if stat.S_IMODE(found.st_mode) & (0o037 if shared_by_root else 0o077):
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 {path}")


def _encode(keys: KeySet) -> bytes:
    content: dict[str, Any] = msgspec.structs.asdict(keys.current)
    if keys.next is not None:
        content["next"] = msgspec.structs.asdict(keys.next)
        content["next_from_unix_s"] = keys.next_from_unix_s
    return json.dumps(content, indent=2).encode()


class _Content(msgspec.Struct, frozen=True):
    """The fields of the file besides the keys of the current generation."""

    next: ControlKeys | None = None
    next_from_unix_s: float = 0.0


def _decode(text: bytes) -> KeySet:
    current = msgspec.json.decode(text, type=ControlKeys)
    more = msgspec.json.decode(text, type=_Content)
    keys = KeySet(current, more.next, more.next_from_unix_s)
    keys.check()
    return keys


@contextlib.contextmanager
def _locked(path: str | Path) -> Iterator[None]:
    """Locks the file's folder (the file itself is replaced) against concurrent changes."""
    folder = Path(path).resolve().parent
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as exc:
        raise ConfigError(f"cannot read the folder {folder}: {exc.strerror}") from exc
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)  # unlocks
