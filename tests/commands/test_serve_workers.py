"""`disagg serve --workers` that cannot start, and workers whose parent is killed."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil
import pytest
from serve_process import Command, command

from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.sockets.processes import process_tree
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

END_S = 60.0


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """Joins a directory that does not exist: the router waits for it."""
    save_keys(make_keys(), tmp_path / "keys")
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", layers=1, hidden=96, head_dim=8, mlp=96)
    found = [
        "serve",
        "--workers",
        "2",
        "--join",
        "tcp://127.0.0.1:1",
        "--model",
        str(checkpoint),
        "--port",
        "0",
    ]
    return [*found, "--set", f"control.key_file={tmp_path / 'keys'}", "--set", "log.format=json"]


def ends(one: Command) -> str:
    """The log of a command, once it and its processes have ended."""
    one.process.wait(END_S)
    return one.log.read_text()


def test_one_error_of_a_worker_that_cannot_start(tmp_path: Path, arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as used:
        port = used.getsockname()[1]
        flags = ["--set", f"control.router_port={port - 1}"]
        with command(tmp_path, [*arguments, *flags]) as one:
            log = ends(one)
            assert one.process.returncode == 2
    said = [line for line in log.splitlines() if line.startswith("disagg: ")]
    assert len(said) == 1
    assert str(port) in said[0]
    assert "Traceback" not in log


def test_a_port_in_use_is_refused_before_workers_start(tmp_path: Path, arguments: list[str]) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    with command(tmp_path / "one", arguments) as one:
        url = one.logged(r'"url": "([^"]+)"')
        port = url.rpartition(":")[2]
        with command(tmp_path / "two", [*arguments, "--port", port]) as other:
            assert f"cannot listen on 127.0.0.1:{port}" in ends(other)
            assert other.process.returncode == 2


def test_workers_end_when_their_parent_is_killed(tmp_path: Path, arguments: list[str]) -> None:
    with command(tmp_path, arguments) as one:
        one.logged(r'"url": "([^"]+)"')
        family = [psutil.Process(pid) for pid in process_tree(one.process.pid)]
        one.process.kill()
        _, alive = psutil.wait_procs(family[1:], timeout=END_S)
        assert not alive
