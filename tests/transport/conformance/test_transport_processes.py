"""UCX between processes: what a test within one process cannot show, above all a peer's sudden death."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S
from forked_processes import ForkedContext
from transport_harness import POISON, Node, Pair, make_node, settle

from disagg.core.errors import PeerLostError
from transport.base import Operation

MIB = 1 << 20
KINDS = [
    pytest.param(("ucx", "cpu"), id="ucx"),
    pytest.param(("ucx-tcp", "cpu"), id="ucx-tcp", marks=pytest.mark.slow),
    pytest.param(("tls", "cpu"), id="tls", marks=pytest.mark.slow),
    pytest.param(("tls-lanes", "cpu"), id="tls-lanes"),
    pytest.param(("ucx", "cuda"), id="ucx-cuda", marks=pytest.mark.gpu),
    pytest.param(("tls", "cuda"), id="tls-cuda", marks=pytest.mark.gpu),
]


def serve(pipe: Connection, backend: str, device: str) -> None:
    """The child: runs commands of its parent, and echoes every message with its tag + 1000."""
    node = make_node(backend, "child", None, torch.device(device), 160 * MIB)
    pipe.send(node.transport.address)
    node.transport.connect("parent", pipe.recv())
    while True:
        if pipe.poll():
            command, *arguments = pipe.recv()
            if command == "close":
                node.transport.close()
                return
            if command == "send":
                send_many(node, *arguments)
            if command == "stall":
                pipe.recv()
        node.pump()
        echo(node)
        node.transport.wait(0.002)


def send_many(node: Node, tags: list[int], nbytes: int) -> None:
    for tag in tags:
        node.transport.send("parent", tag, node.random(nbytes))


def echo(node: Node) -> None:
    for arrival in node.arrived:
        into = node.take(arrival.nbytes)
        node.transport.receive("parent", arrival, into, context=into)
    node.arrived.clear()
    for operation in [op for op in node.ended if op.kind == "receive" and op.error is None]:
        assert isinstance(operation.context, torch.Tensor)
        node.transport.send("parent", operation.tag + 1000, operation.context)
    node.ended.clear()


class Child:
    """A process on the other end of a pipe, and a node here that is connected to it."""

    def __init__(self, backend: str, device: str) -> None:
        context = ForkedContext() if device == "cpu" else multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, backend, device), daemon=True)
        self.process.start()
        self.backend = backend
        self.node = make_node(backend, "parent", None, torch.device(device), 160 * MIB)
        self.join()

    def join(self) -> None:
        """Exchanges addresses."""
        address = self.pipe.recv()
        self.pipe.send(self.node.transport.address)
        self.node.transport.connect("child", address)

    def command(self, *command: Any) -> None:
        self.pipe.send(command)

    def signal(self, number: signal.Signals) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL and joins the process, which would otherwise remain a zombie."""
        self.signal(signal.SIGKILL)
        self.process.join()

    def until(self, condition: Callable[[], bool]) -> None:
        """Drives the node here until `condition` holds."""
        Pair(self.node, self.node, None, self.node.memory.device, self.backend).until(
            condition, only=self.node
        )

    def fence(self, *operations: Operation) -> None:
        """Disconnects the node here from the process, and waits until its operations have ended.

        On a busy machine threads may leave an operation's memory only after `disconnect` has returned.
        """
        self.node.transport.disconnect("child")
        self.until(lambda: all(operation.ended for operation in operations))

    def stop(self) -> None:
        """Ends both sides; the child gently unless it is dead already."""
        with contextlib.suppress(BrokenPipeError):
            self.command("close")
        self.process.join(PATIENCE_S)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()
        self.node.transport.close()
        self.pipe.close()


@pytest.fixture(params=KINDS)
def child(request: pytest.FixtureRequest, capfd: pytest.CaptureFixture[str]) -> Iterator[Child]:
    """A child whose end, and ours, must leave no line on stderr."""
    torch.manual_seed(5)
    child = Child(*request.param)
    yield child
    child.stop()
    assert capfd.readouterr().err == ""


def test_sizes_there_and_back(child: Child) -> None:
    node = child.node
    for tag, size in enumerate([1, 100, 8192, 65_537, MIB, 40 * MIB]):
        sent, got = node.random(size), node.take(size)
        node.transport.send("child", tag, sent)
        child.until(lambda tag=tag: node.has(tag + 1000))
        receive = node.transport.receive("child", node.arrival(tag + 1000), got)
        child.until(lambda receive=receive: receive.ended)
        settle(got)
        assert torch.equal(sent, got)
    child.command("close")
    child.process.join(PATIENCE_S)
    assert child.process.exitcode == 0


def test_a_killed_peer_ends_everything(child: Child) -> None:
    """SIGKILL with receives under way, a send under way, and a message announced but not received."""
    node = child.node
    child.command("send", [1, 2, 3], 16 * MIB)
    child.until(lambda: node.has(1, 2, 3))
    receives = [node.transport.receive("child", node.arrival(tag), node.take(16 * MIB)) for tag in (1, 2)]
    child.command("stall")
    send = node.transport.send("child", 9, node.random(16 * MIB))
    child.kill()
    child.until(lambda: all(op.ended for op in [*receives, send]))
    for operation in [*receives, send]:
        assert operation.error is None or isinstance(operation.error, PeerLostError)
    late = node.transport.receive("child", node.arrival(3), node.take(16 * MIB))
    later = node.transport.send("child", 10, node.memory[:100])
    child.until(lambda: late.ended and later.ended)
    assert isinstance(late.error, PeerLostError)
    assert isinstance(later.error, PeerLostError)
    node.transport.disconnect("child")
    node.memory.fill_(POISON)
    for _ in range(100):
        node.pump()
    settle(node.memory)
    assert (node.memory == POISON).all()


def test_a_peer_killed_in_a_transfer_leaves_the_others_alone(child: Child) -> None:
    """64 MiB under way both to and from the dead process; another peer goes on, before and after the fence."""
    node, other = child.node, make_node(child.backend, "other", None, child.node.memory.device, 4 * MIB)
    pair = Pair(node, other, None, node.memory.device, child.backend)
    node.transport.connect("b", other.transport.address)
    other.transport.connect("a", node.transport.address)

    def exchange(tag: int) -> None:
        sent, got = node.random(MIB), other.take(MIB)
        send = node.transport.send("b", tag, sent)
        pair.until(lambda: other.has(tag))
        receive = other.transport.receive("a", other.arrival(tag), got)
        pair.until(lambda: send.ended and receive.ended)
        settle(got)
        assert (send.error, receive.error) == (None, None)
        assert torch.equal(sent, got)

    exchange(1)
    child.command("send", [5], 64 * MIB)
    child.until(lambda: node.has(5))
    into = node.take(64 * MIB)
    receive = node.transport.receive("child", node.arrival(5), into)
    send = node.transport.send("child", 6, node.random(64 * MIB))
    child.until(lambda: receive.ended or bool((into != POISON).any()))
    child.kill()
    exchange(2)
    child.fence(receive, send)
    assert send.error is None or isinstance(send.error, PeerLostError), "the child may have had all of it"
    exchange(3)
    assert node.transport.statistics().pending == 0
    other.transport.close()


def test_a_silent_peer_can_be_fenced(child: Child) -> None:
    """SIGSTOP: the connection stays open without answers. The fence must not depend on the other side."""
    node = child.node
    child.command("send", [1], 32 * MIB)
    child.until(lambda: node.has(1))
    child.signal(signal.SIGSTOP)
    receive = node.transport.receive("child", node.arrival(1), node.take(32 * MIB))
    send = node.transport.send("child", 2, node.random(32 * MIB))
    node.pump()
    child.fence(receive, send)
    assert isinstance(send.error, PeerLostError)
    node.memory.fill_(POISON)
    child.signal(signal.SIGCONT)
    for _ in range(200):
        node.pump()
        node.transport.wait(0.001)
    settle(node.memory)
    assert (node.memory == POISON).all(), "written after the fence"


def test_a_peer_that_closes_ends_everything(child: Child) -> None:
    node = child.node
    child.command("send", [1, 2], 16 * MIB)
    child.until(lambda: node.has(1, 2))
    child.command("close")
    receive = node.transport.receive("child", node.arrival(1), node.take(16 * MIB))
    child.process.join(PATIENCE_S)
    child.until(lambda: receive.ended)
    late = node.transport.send("child", 3, node.memory[:100])
    child.until(lambda: late.ended)
    node.transport.discard("child", node.arrival(2))
    child.until(lambda: node.transport.statistics().pending == 0)
