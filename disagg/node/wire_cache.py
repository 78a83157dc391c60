"""What was measured of wires, kept between starts: one small JSON file of the user's."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from disagg.core.folders import cache_folder
from staging.wire import Wire

log = structlog.get_logger(__name__)

VERSION = 1


class _Entry(msgspec.Struct, frozen=True):
    overhead_s: float
    bytes_per_s: float


class _File(msgspec.Struct, frozen=True):
    version: int
    wires: dict[str, _Entry]


def cache_path(environment: Mapping[str, str]) -> Path:
    """`wire.json` in the user's cache folder. Raises `RuntimeError` when the user has no home."""
    return cache_folder(environment) / "wire.json"


class WireCache:
    """Of any process of the user's. A wire that two write at once may be lost, and is then measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, Wire]:
        """Wires by key. Of what cannot be read, or no measurement could have found, one line is logged."""
        try:
            found = msgspec.json.decode(self._path.read_bytes(), type=_File)
            if found.version != VERSION:
                raise ValueError(f"it is of version {found.version}, not {VERSION}")
            wires = {key: Wire(entry.overhead_s, entry.bytes_per_s) for key, entry in found.wires.items()}
            if odd := [key for key, wire in wires.items() if not wire.is_sane]:
                raise ValueError(f"no wire is like {wires[odd[0]]}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:  # msgspec's errors and bad UTF-8 are ValueErrors
            log.warning("wire_cache_ignored", path=str(self._path), why=str(exc), how="it is written anew")
            return {}
        return wires

    def store(self, key: str, wire: Wire) -> None:
        """Adds a wire to the file, which is replaced as a whole. What cannot be written is said in one line."""
        entries = {k: _Entry(w.overhead_s, w.bytes_per_s) for k, w in {**self.load(), key: wire}.items()}
        body = msgspec.json.format(msgspec.json.encode(_File(VERSION, entries)), indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            _replace(self._path, body)
        except OSError as exc:
            log.warning(
                "wire_not_kept", path=str(self._path), why=str(exc), how="it is measured at each start"
            )


def _replace(path: Path, body: bytes) -> None:
    """A reader sees the old file or the new one, whole."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(body)
        Path(name).replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
