"""Files that are written in one step."""

from __future__ import annotations

import os
import stat
import threading
from pathlib import Path

import pytest

from disagg.core.folders import create_file, replace_file


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_a_file_is_replaced_with_its_mode(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "f"
    before = os.umask(0)
    try:
        for body in (b"old", b"new"):
            replace_file(path, body, mode)
            assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (body, mode)
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_there_is_not_made_again(tmp_path: Path) -> None:
    path = tmp_path / "f"
    create_file(path, b"first")
    with pytest.raises(FileExistsError):
        create_file(path, b"second")
    assert (path.read_bytes(), stat.S_IMODE(path.stat().st_mode)) == (b"first", 0o600)
    assert list(tmp_path.iterdir()) == [path]


def test_of_several_at_once_one_makes_the_file(tmp_path: Path) -> None:
    path, together = tmp_path / "f", threading.Barrier(8)
    made: list[bytes] = []

    def make(number: int) -> None:
        together.wait()
        try:
            create_file(path, body := b"%d" % number * 1000)
        except FileExistsError:
            return
        made.append(body)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == [path.read_bytes()]


@pytest.mark.parametrize("write", [replace_file, create_file])
def test_what_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: object
) -> None:
    def full(descriptor: int, mode: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr("disagg.core.folders.os.fchmod", full)
    assert callable(write)
    with pytest.raises(OSError, match="the disk is full"):
        write(tmp_path / "f", b"body")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("durable", [False, True])
def test_a_durable_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    synced: list[bool] = []
    monkeypatch.setattr(
        "disagg.core.folders.os.fsync", lambda descriptor: synced.append((tmp_path / "f").exists())
    )
    replace_file(tmp_path / "f", b"body", durable=durable)
    assert synced == [False] * durable
