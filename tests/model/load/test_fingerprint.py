"""Fingerprints of weights: every byte counts, hashes of large files are kept, and a wrong cache costs time only."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

import disagg.model.load.fingerprint
from disagg.model.load.fingerprint import weights_digest


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment with an empty cache folder; every file is large enough for the cache."""
    monkeypatch.setattr(disagg.model.load.fingerprint, "CACHED_BYTES", 1)
    return {"XDG_CACHE_HOME": str(tmp_path / "cache")}


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were hashed."""
    names: list[str] = []
    opened = Path.open

    def note(path: Path, *arguments: Any, **options: Any) -> Any:
        if options.get("buffering") == 0:  # not the test itself
            names.append(path.name)
        return opened(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", note)
    return names


def made(folder: Path, *names: str) -> list[Path]:
    files = [folder / f"{name}.bin" for name in names]
    for file in files:
        file.write_bytes(os.urandom(3 << 20))
    return files


@pytest.mark.parametrize("place", [0, 1_234_567, (3 << 20) - 1])
def test_every_byte_counts(tmp_path: Path, place: int) -> None:
    [file] = made(tmp_path, "a")
    before = weights_digest([file], {})
    body = bytearray(file.read_bytes())
    body[place] ^= 1
    file.write_bytes(body)
    changed = weights_digest([file], {})
    body[place] ^= 1
    file.write_bytes(body)
    assert weights_digest([file], {}) == before != changed


def test_names_and_order_count(tmp_path: Path) -> None:
    first, second = made(tmp_path, "a", "b")
    before = weights_digest([first, second], {})
    content = first.read_bytes(), second.read_bytes()
    first.write_bytes(content[1])
    second.write_bytes(content[0])
    assert weights_digest([first, second], {}) != before


def test_a_hash_is_kept_until_the_file_changes(
    tmp_path: Path, cache: dict[str, str], read: list[str]
) -> None:
    files = made(tmp_path, "a", "b")
    digest = weights_digest(files, cache)
    assert sorted(read) == ["a.bin", "b.bin"]
    assert weights_digest(files, cache) == digest
    assert len(read) == 2, "the second time nothing is read"
    body = bytearray(files[0].read_bytes())
    body[2_000_000] ^= 1
    files[0].write_bytes(body)
    os.utime(files[0], ns=(1, 1))
    changed = weights_digest(files, cache)
    assert changed != digest
    assert read[2:] == ["a.bin"]
    assert weights_digest(files, {"XDG_CACHE_HOME": str(tmp_path / "another")}) == changed, "the same without"


def test_ranks_that_start_together_hash_once(tmp_path: Path, cache: dict[str, str], read: list[str]) -> None:
    files, found = made(tmp_path, "a"), list[str]()
    threads = [threading.Thread(target=lambda: found.append(weights_digest(files, cache))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1
    assert read == ["a.bin"]


@pytest.mark.parametrize("content", [b"", b"{", b'{"version": 2, "files": {}}', b"\xff"])
def test_a_cache_that_cannot_be_read_is_replaced(
    tmp_path: Path, cache: dict[str, str], read: list[str], content: bytes
) -> None:
    files = made(tmp_path, "a")
    digest = weights_digest(files, cache)
    (tmp_path / "cache" / "disagg" / "weights.json").write_bytes(content)
    assert weights_digest(files, cache) == digest
    assert weights_digest(files, cache) == digest
    assert len(read) == 2


def test_without_a_cache_folder_the_hash_is_the_same(tmp_path: Path, cache: dict[str, str]) -> None:
    files = made(tmp_path, "a")
    digest = weights_digest(files, cache)
    (tmp_path / "file").touch()
    assert weights_digest(files, {"XDG_CACHE_HOME": str(tmp_path / "file")}) == digest


def test_small_files_leave_the_cache_alone(tmp_path: Path) -> None:
    weights_digest(made(tmp_path, "a"), {"XDG_CACHE_HOME": str(tmp_path / "cache")})
    assert not (tmp_path / "cache").exists()
