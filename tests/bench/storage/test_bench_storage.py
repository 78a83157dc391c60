"""The storage benchmark: both directions with a ceiling, and wrong bytes are no figure."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from redis_servers import fake_server, real_server

from disagg.bench.storage.run import StorageBench, run
from disagg.cli.app import run as run_command
from disagg.core.errors import InvariantError
from disagg.storage.files import FileStorage

FLAGS = ["--pages", "6", "--page-bytes", "16KiB", "--repeats", "2", "--threads", "2"]
TITLES = [
    "put of 6 pages of 16 KiB",
    "get of 6 pages of 16 KiB",
    "put of one page of 16 KiB",
    "get of one page of 16 KiB",
    "get of a missing page of 16 KiB",
]


def test_the_command_measures_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "storage", *FLAGS, "--folder", str(tmp_path), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [line["title"] for line in results] == TITLES
    assert [line["ceiling"]["name"] for line in results[:2]] == ["pwrite", "preadv"]
    assert all(line["median"] > 0 and len(line["values"]) == 2 for line in results[:2])
    assert list(tmp_path.iterdir()) == []


def test_the_command_measures_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="disagg-redis-", dir="/tmp"))
    try:
        with real_server(folder) as server:
            flags = ["--backend", "redis", "--url", server.url]
            assert run_command(["bench", "storage", *FLAGS, *flags]) == 0
    finally:
        shutil.rmtree(folder)
    table = capsys.readouterr().out
    assert all(title in table for title in TITLES)
    assert "one GET" in table


def test_pages_that_are_not_stored_are_no_figure() -> None:
    with fake_server() as server:
        server.error = b"OOM"
        bench = StorageBench("redis", None, server.url, 4096, 4, 1, direct=False, repeats=1)
        with pytest.raises(InvariantError, match="4 of 4 pages were not stored"):
            run(bench)


def test_wrong_bytes_are_no_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get(
        self: FileStorage, keys: Sequence[bytes], into: Sequence[memoryview], timeout_s: float
    ) -> list[bool]:
        return [True] * len(keys)

    monkeypatch.setattr(FileStorage, "get", get)
    with pytest.raises(InvariantError, match="wrong bytes"):
        run(StorageBench("files", tmp_path, None, 4096, 4, 1, direct=True, repeats=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--page-bytes", "5000"], "multiple of 4096"),
        (["--backend", "redis"], "name the server with --url"),
        (["--folder", "/nowhere"], "no folder can be made there"),
        (["--pages", "1000000000"], "lower --pages"),
    ],
)
def test_mistakes_are_refused(flags: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["bench", "storage", *FLAGS, *flags]) == 2
    assert error in " ".join(capsys.readouterr().err.split())
