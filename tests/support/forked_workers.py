"""Workers of xdist, forked from one process that has imported torch and transformers: each import takes seconds.

xdist starts this file in place of an interpreter. The file sends its standard streams to the process that forks, and
ends when the worker ends. Each worker has a fork of its own for the context `forkserver` of multiprocessing.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

FORKED_PROCESSES = ("disagg.bench.handoff.ranks", "disagg.bench.transfer.wire", "transport.select")
"""Imports of the processes of `forked_processes.py`."""
PRELOADED = (
    "disagg.api.app",
    "disagg.node.rank_start",
    "matplotlib.figure",
    "openai",
    "opentelemetry.sdk.trace",
    "transformers.generation.utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "transformers.models.falcon_h1.modeling_falcon_h1",
    "transformers.models.gemma3.modeling_gemma3",
    "transformers.models.gemma4.modeling_gemma4",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen3.modeling_qwen3",
    *FORKED_PROCESSES,
)
"""They start no thread. They load neither UCX nor CUDA's runtime, which do not survive a fork."""
# A file as `__main__` would run again in each process that multiprocessing spawns.
_SERVER = """
import sys
sys.path.insert(0, {folder!r})
import forked_workers
if forked_workers.serve({number}):
    exec(eval(sys.stdin.readline()))
"""


def fork_workers(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Makes xdist start its workers as forks of a new process, which ends with the test run."""
    name = f"disagg-tests-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        number = listener.fileno()
        code = _SERVER.format(folder=str(Path(__file__).parent), number=number)
        server = subprocess.Popen(
            [sys.executable, "-u", "-c", code], stdin=subprocess.PIPE, pass_fds=[number]
        )
    config.add_cleanup(server.communicate)
    for spec in specs:
        spec.python = f"{sys.executable} -I -S {__file__} {name}"


def serve(number: int) -> bool:
    """Forks for each connection to the socket `number`. Returns True in a fork, False at the end of stdin."""
    import importlib

    from disagg.core.collection import imports_frozen

    with imports_frozen():
        for name in PRELOADED:
            importlib.import_module(name)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a fork would not have the other threads"
    handlers = {one: signal.signal(one, signal.SIG_IGN) for one in (signal.SIGCHLD, signal.SIGINT)}
    with socket.socket(fileno=number) as listener:
        while sys.stdin not in select.select([sys.stdin, listener], [], [])[0]:
            with listener.accept()[0] as connection:
                if not os.fork():
                    listener.close()
                    _become_worker(connection, handlers)
                    return True
    return False


def _become_worker(connection: socket.socket, handlers: Mapping[int, Any]) -> None:
    """Takes the standard streams of the process that connected, which waits until this one ends."""
    for number, handler in handlers.items():
        signal.signal(number, handler)
    _start_fork_server(connection)
    os.dup(connection.fileno())  # open until the process ends
    for place, stream in enumerate(socket.recv_fds(connection, 1, 3)[1]):
        os.dup2(stream, place)
        os.close(stream)


def _start_fork_server(connection: socket.socket) -> None:
    """Gives this process multiprocessing's fork server, as a fork, which need not import torch again."""
    from multiprocessing import forkserver

    server = forkserver._forkserver
    alive, server._forkserver_alive_fd = os.pipe()  # the server ends when this process has ended
    listener = socket.socket(socket.AF_UNIX)
    server._forkserver_address = f"\0disagg-tests-forks-{os.getpid()}"
    listener.bind(server._forkserver_address)
    listener.listen()
    server._forkserver_pid = os.fork()
    if server._forkserver_pid:
        listener.close()
        os.close(alive)
        return
    os.close(server._forkserver_alive_fd)
    connection.close()
    try:
        forkserver.main(listener.detach(), alive, [])
    finally:
        os._exit(0)


def _ask(name: str) -> None:
    """Has a worker forked with this process' standard streams, and waits for its end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the worker
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(f"\0{name}")
        socket.send_fds(connection, [b"0"], [0, 1, 2])
        connection.recv(1)


if __name__ == "__main__":
    _ask(sys.argv[1])
