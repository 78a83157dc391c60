"""Reads and checks the files of a checkpoint. For a broken file, raises `ConfigError` with the file's name and a
remedy.

The checks read names, sizes and headers but no weights, so a broken checkpoint is refused before any process starts.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from disagg.core.errors import ConfigError, DisaggError

AGAIN = "download or copy the checkpoint again"
INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_ZIP, _PICKLE = b"PK\x03\x04", b"\x80"
"""First bytes of torch's weight files, in its current and its older format."""
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000
"""Largest size of a header that the safetensors library accepts."""
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
    except PermissionError as exc:
        raise error(f"{exc.filename or path} cannot be read by this user: change its mode or owner") from exc
    except Exception as exc:
        raise error(f"{path} cannot be used: {_reason(exc)}; {mend}") from exc


def require_checkpoint(directory: Path) -> None:
    """Raises `ConfigError` unless `directory` has a config.json with a JSON object, and complete weights."""
    require_config(directory)
    weight_files(directory)


def require_config(directory: Path) -> None:
    """Raises `ConfigError` unless `directory` has a config.json that contains a JSON object."""
    with reading(directory):
        if not directory.is_dir():
            raise ConfigError(f"no such model directory: {directory}")
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

    Raises `ConfigError` if there are no weights, a shard of the index is missing, or a file is damaged.
    """
    with reading(directory):
        for pattern, index, check in (
            ("*.safetensors", INDEX, _check_safetensors),
            ("*.bin", TORCH_INDEX, _check_torch),
        ):
            _check_index(directory / index)
            files = sorted(directory.glob(pattern))
            for file in files:
                _require_file(file)
                check(file)
            if files:
                return files
        raise ConfigError(f"{directory} has no weights (*.safetensors or *.bin); {AGAIN}")


def _check_index(path: Path) -> None:
    if not (path.exists() or path.is_symlink()):
        return
    shards = read_json_object(path).get("weight_map")
    if not (isinstance(shards, dict) and all(isinstance(name, str) for name in shards.values())):
        raise ConfigError(f"{path} has no weight_map from weights to files; {AGAIN}")
    missing = sorted(name for name in set(shards.values()) if not (path.parent / name).exists())
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
    """Raises `ConfigError` unless the header is JSON, and its offsets match the file's size exactly."""
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


def _check_torch(path: Path) -> None:
    """Raises `ConfigError` unless the file is a complete zip archive (torch's format) or a pickle (the older format).

    A truncated pickle is detected only when it is loaded. Files with other names are not checked, because they are
    not loaded.
    """
    if not path.name.startswith("pytorch_model"):
        return
    with reading(path), path.open("rb") as file:
        begin = file.read(len(_ZIP))
        if begin.startswith(_PICKLE) or zipfile.is_zipfile(path):
            return
    why = "is truncated" if begin == _ZIP else "has another format" if begin else "is empty"
    raise ConfigError(f"{path} is no weight file of torch: the file {why}; {AGAIN}")


def _reason(exc: Exception) -> str:
    text = " ".join(str(exc).split())
    # The message of a KeyError or AssertionError is useless without the name of the class.
    said = text if isinstance(exc, OSError | ValueError) and text else f"{type(exc).__name__} {text}".strip()
    return said if len(said) <= _REASON_CHARACTERS else said[:_REASON_CHARACTERS] + "..."
