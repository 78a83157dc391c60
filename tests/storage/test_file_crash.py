"""Writers that are killed: no torn page is served, and each page that was reported as stored is found."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from file_storages import PAGES_EACH, Opened, opened
from storage_pages import exists, get, put
from storage_writer import PAGE_BYTES

from disagg.storage.files import FileSettings, FileStorage

__all__ = ["opened"]

ROOT = Path(__file__).resolve().parents[2]
WRITER = ROOT / "tests" / "support" / "storage_writer.py"
KILLS, MANY_KILLS = 3, 60


def killed_writer(folder: Path, first: int, lines: int, *, most: int | None = None) -> list[int]:
    """Runs a writer until it has printed `lines` lines, then kills it; returns the names that it printed.

    Until the kill, the writer stores further pages; with `most`, that many in total.
    """
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{WRITER.parent}"}
    command = [sys.executable, str(WRITER), str(folder), str(first), *([] if most is None else [str(most)])]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        said = [writer.stdout.readline() for _ in range(lines)]
        writer.kill()
        said += writer.stdout.readlines()
    names = [int(line) for line in said if line.endswith(b"\n")]
    assert len(names) >= lines, said
    return names


def kill_and_reopen(folder: Path, seed: int, rounds: int) -> None:
    draw = random.Random(seed)
    stored: list[int] = []
    for _ in range(rounds):
        first = stored[-1] + 1000 if stored else 0
        stored += killed_writer(folder, first, draw.randint(1, 40))
        storage = FileStorage(FileSettings(folder, 64 << 20, 1 << 20, threads=2, refresh_s=0))
        try:
            assert get(storage, stored, PAGE_BYTES) == [True] * len(stored)
            # Pages that were written while the writer died: intact or missing, which `get` compares.
            get(storage, range(stored[-1] + 1, stored[-1] + 20), PAGE_BYTES)
            assert put(storage, [("more", seed, len(stored))]) == [True]
            storage.check()
        finally:
            storage.close()


def test_a_killed_writer_loses_no_stored_page(tmp_path: Path) -> None:
    kill_and_reopen(tmp_path, 1, KILLS)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 2 + MANY_KILLS // 10))
def test_killed_writers_lose_no_stored_page(tmp_path: Path, seed: int) -> None:
    kill_and_reopen(tmp_path, seed, 10)


@pytest.mark.parametrize("direct", [True, False])
def test_a_segment_that_ends_anywhere(opened: Opened, tmp_path: Path, direct: bool) -> None:
    """Of a file that was cut off anywhere, complete pages are served."""
    storage = opened(direct=direct)
    put(storage, range(6))
    (source,) = opened.files()
    for end in (0, 1, 79, 80, 4096, 5079, 5080, 8191, 8192, 8272, 3 * 8192 + 4096, 4 * 8192 + 5080):
        folder = tmp_path / f"{direct}-{end}"
        folder.mkdir()
        shutil.copy(source, folder / source.name)
        os.truncate(folder / source.name, end)
        copied = FileStorage(FileSettings(folder, 8 << 20, 256 << 10, refresh_s=0, direct=direct))
        whole = sum(8192 * place + 5080 <= end for place in range(6))
        assert get(copied, range(6)).count(True) == whole, end
        copied.check()
        copied.close()


def test_a_hole_hides_no_later_record(opened: Opened, tmp_path: Path) -> None:
    """A writer was killed before an earlier one of two concurrent writes had begun."""
    storage = opened()
    put(storage, range(6))
    folder = tmp_path / "copy"
    shutil.copytree(opened.folder, folder)
    (path,) = folder.glob("*.pages")
    with path.open("r+b") as file:
        file.seek(8192)
        file.write(bytes(2 * 8192))
    copied = FileStorage(FileSettings(folder, 8 << 20, 256 << 10, refresh_s=0))
    assert exists(copied, range(6)).count(True) == 4
    assert get(copied, range(6)).count(True) == 4
    copied.close()


def test_a_start_scans_no_headers_of_sealed_segments(opened: Opened) -> None:
    storage = opened()
    put(storage, range(3 * PAGES_EACH))
    storage.close()
    reads = opened.disk.reads
    assert exists(opened(), range(3 * PAGES_EACH)) == [True] * (3 * PAGES_EACH)
    assert opened.disk.reads == reads
