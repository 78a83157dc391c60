"""The file in which measured wires are kept: whole, or ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from disagg.node.wire_cache import WireCache, cache_path
from staging.wire import Wire
from transport.ucx.library import settings

NVLINK, TCP = Wire(2e-5, 3.5e11), Wire(1e-4, 1e9)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "not there yet" / "wire.json"


def test_what_is_stored_is_loaded(path: Path) -> None:
    cache = WireCache(path)
    with capture_logs() as lines:
        assert cache.load() == {}, "no file yet, and that is no trouble"
        cache.store("a to b", NVLINK)
        cache.store("a to c", TCP)
        cache.store("a to b", TCP)
        assert WireCache(path).load() == {"a to b": TCP, "a to c": TCP}
    assert lines == []
    assert [file.name for file in path.parent.iterdir()] == ["wire.json"], "nothing else is left"


ENTRY = {"overhead_s": 1e-5, "bytes_per_s": 1e9}
BROKEN: dict[str, Any] = {
    "no JSON": "{",
    "empty": "",
    "no UTF-8": b"\xff\xfe",
    "another version": json.dumps({"version": 2, "wires": {}}),
    "no wires": json.dumps({"version": 1}),
    "a word for a number": json.dumps({"version": 1, "wires": {"a": {**ENTRY, "overhead_s": "fast"}}}),
    "no rate": json.dumps({"version": 1, "wires": {"a": ENTRY, "b": {"overhead_s": 1e-5}}}),
    "a rate of 0": json.dumps({"version": 1, "wires": {"a": ENTRY, "b": {**ENTRY, "bytes_per_s": 0}}}),
    "less than nothing": json.dumps({"version": 1, "wires": {"a": {**ENTRY, "overhead_s": -1}}}),
}


@pytest.mark.parametrize("body", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_a_line_and_written_anew(path: Path, body: str | bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    cache = WireCache(path)
    with capture_logs() as lines:
        assert cache.load() == {}
    assert [(line["event"], line["path"]) for line in lines] == [("wire_cache_ignored", str(path))]
    cache.store("a", NVLINK)
    assert cache.load() == {"a": NVLINK}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with capture_logs() as lines:
        WireCache(tmp_path / "file" / "wire.json").store("a", NVLINK)
    assert [line["event"] for line in lines][-1] == "wire_not_kept"


def test_a_file_is_replaced_whole_or_not_at_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = WireCache(path)
    cache.store("a", NVLINK)

    def full(self: Path, target: Path) -> Path:
        raise OSError("the disk is full")

    monkeypatch.setattr(Path, "replace", full)
    with capture_logs() as lines:
        cache.store("b", TCP)
    assert [line["why"] for line in lines] == ["the disk is full"]
    assert cache.load() == {"a": NVLINK}
    assert [file.name for file in path.parent.iterdir()] == ["wire.json"]


def test_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert cache_path({"XDG_CACHE_HOME": "/var/mine"}) == Path("/var/mine/disagg/wire.json")
    for unset in ({}, {"XDG_CACHE_HOME": ""}, {"XDG_CACHE_HOME": "relative"}):
        assert cache_path(unset) == Path("/home/me/.cache/disagg/wire.json")


def test_what_the_environment_tells_ucx_is_part_of_a_key() -> None:
    environment = {"UCX_TLS": "tcp", "UCX_LOG_LEVEL": "info", "PATH": "/bin", "UCX_NET_DEVICES": "mlx5_0:1"}
    assert settings(environment) == "UCX_NET_DEVICES=mlx5_0:1 UCX_TLS=tcp"
    assert settings({}) == ""
