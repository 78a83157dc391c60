"""The operator's side of a roll, with a real directory in the same process. The replacement itself is scripted."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator

import pytest
from conditions import PATIENCE_S

from disagg.cluster.directory import Directory
from disagg.commands.roll import roll
from disagg.core.errors import DisaggError, PeerLostError
from transport.control import messages as m
from transport.control.inproc import InprocControl, InprocHub
from transport.control.reliable import ReliableOptions

SHORT = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.4)
REQUEST = m.Roll([m.RollSetting("decode", "max_requests", 2, "flag decode.max_requests")])


class Script:
    """A directory whose rolls are scripted by the test."""

    def __init__(self) -> None:
        self.hub = InprocHub()
        self.directory = Directory(InprocControl(self.hub, "directory", SHORT))
        self.requests: list[m.Roll] = []
        self.send: Callable[[m.Message], None] = lambda message: None
        self.stopped: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.on_begin: Callable[[], None] = lambda: None
        self.on_stop: Callable[[], None] = lambda: None
        self.lines: list[str] = []
        self.signals: queue.SimpleQueue[None] = queue.SimpleQueue()

    def start(self) -> None:
        self.directory.start()

    def rolls(self) -> None:
        """The directory accepts rolls from now on."""
        self.directory.on_roll(self._begin, self._stop)

    def _begin(self, operator: str, request: m.Roll, send: Callable[[m.Message], None]) -> None:
        self.requests.append(request)
        self.send = send
        self.on_begin()

    def _stop(self, operator: str) -> None:
        self.stopped.put(operator)
        self.on_stop()

    def roll(self, name: str = "operator") -> None:
        control = InprocControl(self.hub, name, SHORT)
        try:
            roll(control, "directory", REQUEST, self.lines.append, self.signals)
        finally:
            control.close()


@pytest.fixture
def script() -> Iterator[Script]:
    script = Script()
    script.start()
    yield script
    script.directory.close()


def test_steps_are_printed_and_the_end_names_the_new_groups(script: Script) -> None:
    def begin() -> None:
        script.send(m.RollStep("decode: draining decode"))
        script.send(m.Rolled("", ("prefill", "decode-2")))

    with pytest.raises(DisaggError, match="the cluster is still starting"):
        script.roll("early")
    script.rolls()
    script.on_begin = begin
    script.roll()
    assert script.requests == [REQUEST]
    assert script.lines == [
        "decode: draining decode",
        "all groups have the new settings: prefill, decode-2",
    ]


def test_a_failure_names_new_and_old_groups(script: Script) -> None:
    script.rolls()
    script.on_begin = lambda: script.send(m.Rolled("decode-3 does not start", ("decode-2",), ("decode",)))
    with pytest.raises(
        DisaggError,
        match=r"^decode-3 does not start \(new groups: decode-2; old groups: decode; all of them serve",
    ) as failed:
        script.roll()
    assert failed.value.exit_code == 1
    script.on_begin = lambda: script.send(m.Rolled("model.dtype cannot change"))
    with pytest.raises(DisaggError, match=r"^model.dtype cannot change$"):
        script.roll("next")


def test_a_signal_stops_the_roll_and_waits_for_its_end(script: Script) -> None:
    script.rolls()
    script.on_begin = lambda: script.signals.put(None)
    script.on_stop = lambda: script.send(
        m.Rolled("the operator has stopped the roll", ("decode-2",), ("decode",))
    )
    with pytest.raises(KeyboardInterrupt):
        script.roll()
    assert script.stopped.get(timeout=PATIENCE_S) == "operator"
    assert script.lines[-1].startswith(
        "the operator has stopped the roll. new groups: decode-2; old groups: decode. All of them serve"
    )


def test_a_second_signal_does_not_wait_and_the_lost_operator_stops_the_roll(script: Script) -> None:
    script.rolls()

    def begin() -> None:
        script.signals.put(None)
        script.signals.put(None)

    script.on_begin = begin
    with pytest.raises(KeyboardInterrupt):
        script.roll()
    assert script.stopped.get(timeout=PATIENCE_S) == "operator"
    script.hub.cut("operator")
    assert script.stopped.get(timeout=PATIENCE_S) == "operator", "also without a message"


def test_a_lost_directory_ends_the_command(script: Script) -> None:
    script.rolls()
    cutter = threading.Thread(target=script.hub.cut, args=("directory",))
    script.on_begin = cutter.start
    with pytest.raises(PeerLostError, match="no directory answers at directory"):
        script.roll()
    cutter.join(PATIENCE_S)
