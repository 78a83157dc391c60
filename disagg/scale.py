"""`disagg scale`: tells the directory of a running `disagg launch` how many groups there shall be."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping

from disagg.cluster_keys import join_keys
from disagg.core.config import Config, Role
from disagg.core.errors import DisaggError, PeerLostError
from disagg.core.log import configure
from disagg.directory import directory_host
from transport import messages as m
from transport.control import ControlChannel
from transport.control_zmq import make_control


def run_scale(config: Config, directory: str, counts: Mapping[Role, int]) -> None:
    """Asks the directory at `directory` for so many groups of each role, and waits until they are there.

    Raises `DisaggError` with what it answers, `PeerLostError` when it does not.
    """
    configure(config.log)
    directory_host(directory, config.control)  # an address that is none is refused first
    keys = join_keys(config.control, directory, os.environ)
    control = make_control(config.control, keys)
    try:
        scale(control, directory, counts)
    finally:
        control.close(linger_s=0.2)


def scale(control: ControlChannel, directory: str, counts: Mapping[Role, int]) -> None:
    """`run_scale` on a channel that has not been started."""
    answers: list[str | None] = []
    answered = threading.Condition()

    def hear(answer: str | None) -> None:
        with answered:
            answers.append(answer)
            answered.notify()

    def on_message(peer: str, message: m.Message) -> None:
        if peer == directory and isinstance(message, m.Scaled):
            hear(message.error)

    control.start(on_message, lambda peer: hear(None))
    control.watch(directory)
    for role, count in counts.items():
        control.send(directory, m.Scale(role, count))
        with answered:
            answered.wait_for(lambda: answers)
            error = answers.pop()
        if error is None:
            raise PeerLostError(f"no directory answers at {directory}: is `disagg launch` running there?")
        if error:
            raise DisaggError(f"{role}={count}: {error}")
