"""`disagg serve --workers` that cannot start, and its end by a signal."""

from __future__ import annotations

import asyncio
import multiprocessing.spawn
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from conditions import PATIENCE_S
from serve_process import LIGHT, Command, command, until_gone

from disagg.commands import workers
from disagg.commands.router_server import ModelFacts
from disagg.core.config.read import ApiConfig, Config
from disagg.core.errors import ConfigError, DisaggError
from disagg.model.load.tiny import make_tiny_checkpoint
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

SIGNAL_END_S = 20.0


def arguments_in(folder: Path) -> list[str]:
    """Of a command that joins a directory which does not exist: the router waits for it."""
    save_keys(make_keys(), folder / "keys")
    checkpoint = make_tiny_checkpoint(folder / "tiny", LIGHT, layers=1, hidden=96, head_dim=8, mlp=96)
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
    return [*found, "--set", f"control.key_file={folder / 'keys'}", "--set", "log.format=json"]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Command]:
    """A command with two workers, which the last test ends."""
    folder = tmp_path_factory.mktemp("running")
    with command(folder, arguments_in(folder)) as one:
        yield one


def ends(one: Command) -> str:
    """The log of a command, once it and its processes have ended."""
    one.process.wait(PATIENCE_S)
    return one.log.read_text()


@contextmanager
def port_behind_a_free_one() -> Iterator[int]:
    """Listens on a port, for the second worker; the port before it, for the first worker, is free."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as used:
            port: int = used.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port - 1)).close()
            except OSError:
                continue
            yield port
            return


def test_one_error_of_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with port_behind_a_free_one() as port:
        flags = ["--set", f"control.router_port={port - 1}"]
        with command(tmp_path, [*arguments_in(tmp_path), *flags]) as one:
            log = ends(one)
            assert one.process.returncode == 2
    said = [line for line in log.splitlines() if line.startswith("disagg: ")]
    assert len(said) == 1
    assert str(port) in said[0]
    assert "Traceback" not in log


def test_a_port_in_use_is_refused_before_workers_start(tmp_path: Path, running: Command) -> None:
    url = running.logged(r'"url": "([^"]+)"')
    port = url.rpartition(":")[2]
    with command(tmp_path, [*arguments_in(tmp_path), "--port", port]) as other:
        assert f"cannot listen on 127.0.0.1:{port}" in ends(other)
        assert other.process.returncode == 2


def test_workers_import_no_torch(running: Command) -> None:
    """They get the tokenizer from their parent, which has read the model's configuration with torch."""
    running.logged(r'"url": "([^"]+)"')
    parent, *others = (
        {Path(one.path).name for one in process.memory_maps()}
        for process in running.family()
        if "resource_tracker" not in " ".join(process.cmdline())
    )
    assert "libtorch_cpu.so" in parent
    assert len(others) == 2
    assert all("libtorch_cpu.so" not in other for other in others)


def test_a_tokenizer_that_cannot_be_copied_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = ModelFacts("tiny", lambda text: text, context_tokens=8, vocab_tokens=8, eos_ids=())
    monkeypatch.setattr(workers, "model_facts", lambda config: facts)
    with pytest.raises(
        ConfigError, match=r"tokenizer of tiny, a function, .*set api.workers \(--workers\) to 1"
    ):
        workers.worker_model(Config(), "")


def test_a_worker_that_dies_at_once_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a tokenizer that is larger than a pipe, which nobody would read."""
    resource_tracker.ensure_running()
    monkeypatch.setattr(multiprocessing.spawn, "_python_exe", b"/bin/false")
    config = Config(api=ApiConfig(workers=2))
    model = workers.WorkerModel(bytes(1 << 20), "fingerprint")
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        pytest.raises(DisaggError, match="a worker ended: exit code 1"),
    ):
        asyncio.run(workers.run_workers(config, model, "tcp://127.0.0.1:1", listener))


def test_a_signal_ends_all_workers(running: Command) -> None:
    """`tests/cluster/test_killed.py` tests workers whose parent is killed."""
    running.logged(r'"url": "([^"]+)"')
    family, began_s = running.family(), time.monotonic()
    assert len(family) > 2, "the parent and two workers"
    running.process.send_signal(signal.SIGTERM)
    assert running.process.wait(PATIENCE_S) == 0, running.log.read_text()
    until_gone(family)
    assert time.monotonic() - began_s < SIGNAL_END_S
    assert running.log.read_text().count('"event": "stopping"') == 2, "each worker has drained"
