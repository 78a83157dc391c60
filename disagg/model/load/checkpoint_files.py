"""Reads the files of a checkpoint. For a broken file, raises a `ConfigError` with the file's name and a remedy.

The checks read names, sizes and headers but no weights, so a broken checkpoint is refused before any process starts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from disagg.core.errors import ConfigError, DisaggError

AGAIN = "download or copy the checkpoint again"
INDEX = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Limit of a header's size in the safetensors library."""
_REASON_CHARACTERS = 300


@contextmanager
def reading(path: Path, mend: str = AGAIN, error: type[ConfigError] = ConfigError) -> Iterator[None]:
    """Converts errors of libraries and of the system inside the block to `error`, with `path` and the remedy `mend`.

    All classes of exceptions are converted, because libraries raise nearly any class for an invalid file. Only
    `DisaggError`s pass unchanged.
    """
    try:
        yield
    except (DisaggError, MemoryError):
        raise
    except Exception as exc:
        raise error(f"{path} cannot be used: {_reason(exc)}; {mend}") from exc


def require_checkpoint(directory: Path) -> None:
    """Raises `ConfigError` unless `directory` has a config.json of JSON and complete weights."""
    require_config(directory)
    weight_files(directory)


def require_config(directory: Path) -> None:
    """Raises `ConfigError` unless `directory` has a config.json that contains a JSON object."""
    if not directory.is_dir():
        hub = not directory.is_absolute() and len(directory.parts) == 2
        remedy = "; models are not downloaded: give the folder of a checkpoint on this machine" if hub else ""
        raise ConfigError(f"no such model directory: {directory}{remedy}")
    if not (directory / "config.json").is_file():
        raise ConfigError(f"{directory} has no config.json; it is not a model checkpoint")
    read_json_object(directory / "config.json")


def read_json_object(path: Path) -> dict[str, Any]:
    """Returns the JSON object in a file. Accepts `Infinity` and `NaN`, which some checkpoints contain.

    Raises `ConfigError` for any other content.
    """
    _require_file(path)
    with reading(path):
        found = json.loads(path.read_bytes())
        if not isinstance(found, dict):
            raise ValueError("the file does not contain a JSON object")
        return found


def weight_files(directory: Path) -> list[Path]:
    """Returns the checkpoint's complete weight files, sorted: safetensors if present, else torch's.

    Raises `ConfigError` if there are no weights, a shard of the index is missing, or a safetensors file is damaged.
    """
    _check_index(directory)
    for pattern in ("*.safetensors", "*.bin"):
        files = sorted(directory.glob(pattern))
        for file in files:
            _require_file(file)
            if file.suffix == ".safetensors":
                _check_safetensors(file)
        if files:
            return files
    raise ConfigError(f"{directory} has no weights (*.safetensors or *.bin); {AGAIN}")


def _check_index(directory: Path) -> None:
    path = directory / INDEX
    if not (path.exists() or path.is_symlink()):
        return
    shards = read_json_object(path).get("weight_map")
    if not (isinstance(shards, dict) and all(isinstance(name, str) for name in shards.values())):
        raise ConfigError(f"{path} has no weight_map from weights to files; {AGAIN}")
    missing = sorted(name for name in set(shards.values()) if not (directory / name).exists())
    if missing:
        raise ConfigError(f"{path} names the missing file {missing[0]} ({len(missing)} missing); {AGAIN}")


def _require_file(path: Path) -> None:
    """Raises `ConfigError` unless `path` is a file. Opening a pipe or a device could block forever."""
    if not path.exists():
        broken = "is a broken link" if path.is_symlink() else "does not exist"
        raise ConfigError(f"{path} {broken}; {AGAIN}")
    if not path.is_file():
        raise ConfigError(f"{path} is not a file; {AGAIN}")


def _check_safetensors(path: Path) -> None:
    """Raises `ConfigError` unless the header is JSON and gives exactly the file's size."""
    with reading(path), path.open("rb") as file:
        size_bytes = path.stat().st_size
        header_bytes = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        fits = size_bytes >= _LENGTH_BYTES + header_bytes and header_bytes <= _MAX_HEADER_BYTES
        if not fits or size_bytes <= _LENGTH_BYTES:
            raise ConfigError(
                f"{path} has no complete safetensors header: the file is truncated or has another format; {AGAIN}"
            )
        header = msgspec.json.decode(file.read(header_bytes), type=dict[str, dict[str, Any]])
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
    expected_bytes = _LENGTH_BYTES + header_bytes + max(ends, default=0)
    if size_bytes != expected_bytes:
        raise ConfigError(
            f"{path} has {size_bytes} bytes instead of {expected_bytes}: the file is incomplete or damaged; {AGAIN}"
        )


def _reason(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    # The text of a KeyError or of an assertion is useless without the class.
    said = text if isinstance(exc, OSError | ValueError) and text else f"{type(exc).__name__} {text}".strip()
    return said if len(said) <= _REASON_CHARACTERS else said[:_REASON_CHARACTERS] + "..."
