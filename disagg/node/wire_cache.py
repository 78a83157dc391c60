"""Cache of measured wires in a JSON file of the user. A *wire* is the overhead and bandwidth between two ranks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec
import structlog

from disagg.core.folders import cache_folder, replace_file
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
    """Returns the path of `wire.json` in the user's cache folder. Raises `RuntimeError` without a home folder."""
    return cache_folder(environment) / "wire.json"


class WireCache:
    """The cache file. If two processes write at once, a wire can be lost; it is then measured again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, Wire]:
        """Returns the wires by key; logs a warning and returns {} if the file is unreadable or implausible."""
        try:
            file = msgspec.json.decode(self._path.read_bytes(), type=_File)
            if file.version != VERSION:
                raise ValueError(f"the file has version {file.version}, not {VERSION}")
            wires = {key: Wire(entry.overhead_s, entry.bytes_per_s) for key, entry in file.wires.items()}
            if odd := [key for key, wire in wires.items() if not wire.is_sane]:
                raise ValueError(f"implausible wire {wires[odd[0]]}")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as exc:  # msgspec's errors and bad UTF-8 are ValueErrors
            log.warning(
                "wire_cache_ignored",
                path=str(self._path),
                why=str(exc),
                how="the next measurement replaces the file",
            )
            return {}
        return wires

    def store(self, key: str, wire: Wire) -> None:
        """Adds a wire and replaces the file; logs one warning if the file cannot be written."""
        entries = {k: _Entry(w.overhead_s, w.bytes_per_s) for k, w in {**self.load(), key: wire}.items()}
        body = msgspec.json.format(msgspec.json.encode(_File(VERSION, entries)), indent=1)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, body)
        except OSError as exc:
            log.warning(
                "wire_not_kept", path=str(self._path), why=str(exc), how="each start measures the wire"
            )
