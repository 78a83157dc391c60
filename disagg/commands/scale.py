"""`disagg scale`: sends new group counts to the directory of a running `disagg launch`."""

from __future__ import annotations

import threading
from collections.abc import Mapping

from disagg.commands.operator_channel import operator_channel
from disagg.core.config.read import Config, Role
from disagg.core.errors import DisaggError, PeerLostError
from transport.control import messages as m
from transport.control.base import ControlChannel


def run_scale(config: Config, directory: str, counts: Mapping[Role, int]) -> None:
    """Sends `counts`, the number of groups per role, to the directory at `directory`; returns when they are reached.

    Raises `DisaggError` with the directory's error, `PeerLostError` if the directory does not answer.
    """
    with operator_channel(config, directory) as control:
        scale(control, directory, counts)


def scale(control: ControlChannel, directory: str, counts: Mapping[Role, int]) -> None:
    """Sends `counts` to the directory one role at a time, and waits for each reply. Starts the channel `control`.

    Raises as `run_scale`.
    """
    errors: list[str | None] = []
    received = threading.Condition()

    def on_reply(error: str | None) -> None:
        with received:
            errors.append(error)
            received.notify()

    def on_message(peer: str, message: m.Message) -> None:
        if peer == directory and isinstance(message, m.Scaled):
            on_reply(message.error)

    control.start(on_message, lambda peer: on_reply(None))
    control.watch(directory)
    for role, count in counts.items():
        control.send(directory, m.Scale(role, count))
        with received:
            received.wait_for(lambda: errors)
            error = errors.pop()
        if error is None:
            raise PeerLostError(f"no directory answers at {directory}: is `disagg launch` running there?")
        if error:
            raise DisaggError(f"{role}={count}: {error}")
