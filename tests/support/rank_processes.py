"""Data planes of ranks, each in a process of its own, as `disagg serve` would make them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from multiprocessing.connection import Connection
from typing import Any

import torch
from conditions import PATIENCE_S
from forked_processes import ForkedContext

from disagg.core.config.read import TransportConfig
from transport.base import Transport
from transport.reach import Choice, choose
from transport.select import make_transport

NBYTES = 1 << 20


def content(tag: int) -> bytes:
    """What a message with this tag carries."""
    return hashlib.shake_128(tag.to_bytes(4, "big")).digest(NBYTES)


class RankProcess:
    """A transport in a process that drives it all the time."""

    def __init__(self, choice: Choice) -> None:
        context = ForkedContext()
        self._pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, choice), daemon=True)
        self.process.start()
        theirs.close()

    @cached_property
    def address(self) -> bytes:
        """The transport's address: the first message of the process. Waits for its start."""
        return bytes(self._answer())

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ask(self, *command: Any) -> Any:
        """See `_serve`."""
        _ = self.address  # received before any answer
        self._pipe.send(command)
        return self._answer()

    def stop(self) -> None:
        """Also of a process that has died."""
        self.process.kill()
        self.process.join()
        self._pipe.close()

    def _answer(self) -> Any:
        assert self._pipe.poll(PATIENCE_S), "the rank does not answer"
        try:
            return self._pipe.recv()
        except EOFError:
            self.process.join()
            raise AssertionError(f"the rank has died, exit code {self.process.exitcode}") from None


@contextmanager
def rank_processes(choice: Choice | None = None) -> Iterator[tuple[RankProcess, RankProcess]]:
    """Two ranks that are connected; by default with what a rank on loopback chooses."""
    choice = choice or choose(TransportConfig(), "127.0.0.1")
    a, b = RankProcess(choice), RankProcess(choice)
    try:
        a.ask("connect", "peer", b.address)
        b.ask("connect", "peer", a.address)
        yield a, b
    finally:
        a.stop()
        b.stop()


def exchange(a: RankProcess, b: RankProcess, tag: int) -> None:
    """Bytes both ways arrive whole."""
    for source, destination in ((a, b), (b, a)):
        source.ask("send", tag)
        assert destination.ask("receive", tag) == hashlib.sha256(content(tag)).hexdigest()


def _serve(pipe: Connection, choice: Choice) -> None:
    made = make_transport(choice.backend, reach=choice.reach, interface=choice.interface)
    memory = torch.zeros(2 * NBYTES, dtype=torch.uint8)
    made.register(memory)
    pipe.send(made.address)
    arrived: dict[int, Any] = {}
    while True:
        if not pipe.poll():
            _drive(made, arrived)
            continue
        match pipe.recv():
            case ("connect", peer, address):
                made.connect(peer, address)
                pipe.send(None)
            case ("send", tag):
                memory[:NBYTES] = torch.frombuffer(bytearray(content(tag)), dtype=torch.uint8)
                made.send("peer", tag, memory[:NBYTES])
                pipe.send(None)
            case ("receive", tag):
                until_s = time.monotonic() + PATIENCE_S
                while tag not in arrived and time.monotonic() < until_s:
                    _drive(made, arrived)
                into = memory[NBYTES:]
                operation = made.receive("peer", arrived.pop(tag), into)
                while not operation.ended and time.monotonic() < until_s:
                    _drive(made, arrived)
                assert operation.error is None
                pipe.send(hashlib.sha256(into.numpy().tobytes()).hexdigest())
            case ("place",):
                pipe.send(memory.data_ptr())
            case ("look", nbytes):
                pipe.send(memory[:nbytes].numpy().tobytes())


def _drive(made: Transport, arrived: dict[int, Any]) -> None:
    made.progress()
    arrived.update({one.tag: one for one in made.arrivals()})
    made.wait(0.002)
