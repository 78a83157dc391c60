"""`disagg serve --workers` that cannot start. `tests/system/test_workers_real.py` has one that can."""

from __future__ import annotations

import asyncio
import multiprocessing.spawn
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

import pytest
from conditions import PATIENCE_S
from ports import free_port
from serve_process import LIGHT, command

from disagg.commands import workers
from disagg.commands.router_server import ModelFacts
from disagg.core.config.read import ApiConfig, Config
from disagg.core.errors import ConfigError, DisaggError
from disagg.model.load.tiny import make_tiny_checkpoint
from transport.keys.curve import make_keys
from transport.keys.file import save_keys


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


@contextmanager
def port_behind_a_free_one() -> Iterator[int]:
    """Listens on a port, for the second worker; the port before it, for the first worker, is free."""
    while True:
        port = free_port() + 1
        try:
            used = socket.create_server(("127.0.0.1", port))
        except OSError:
            continue
        with used:
            yield port
        return


def test_one_error_of_a_worker_that_cannot_start(tmp_path: Path) -> None:
    with port_behind_a_free_one() as port:
        flags = ["--set", f"control.router_port={port - 1}"]
        with command(tmp_path, [*arguments_in(tmp_path), *flags]) as one:
            assert one.process.wait(PATIENCE_S) == 2
            log = one.log.read_text()
    said = [line for line in log.splitlines() if line.startswith("disagg: ")]
    assert len(said) == 1
    assert str(port) in said[0]
    assert "Traceback" not in log


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
