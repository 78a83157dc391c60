"""`disagg roll`: lets a running `disagg launch` replace its groups by groups with changed settings."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence

from disagg.commands.operator_channel import operator_channel
from disagg.commands.signals import handlers_restored, on_signal
from disagg.core.config.read import Config, Role, Setting
from disagg.core.errors import DisaggError, PeerLostError
from transport.control import messages as m
from transport.control.base import ControlChannel

LOOK_S = 0.5
"""Longest time until a signal is noticed."""


def roll_request(
    settings: Sequence[Setting], kinds: Sequence[Role], max_surge: int, allow_pause: bool
) -> m.Roll:
    """Returns the request that `roll` sends. See `disagg.cli.roll.RollOptions`."""
    changes = [m.RollSetting(one.section, one.key, one.value, one.origin) for one in settings]
    return m.Roll(changes, tuple(kinds), max_surge, allow_pause)


def run_roll(config: Config, directory: str, request: m.Roll, say: Callable[[str], None]) -> None:
    """Sends the request to the directory at `directory`; returns when all groups are replaced. Calls `say` with each
    line of text.

    The first SIGINT or SIGTERM stops the roll as soon as the usual number of groups serves; the second one ends the
    command at once. Raises `DisaggError` with the directory's error and the names of new and old groups,
    `PeerLostError` if the directory is lost, and `KeyboardInterrupt` after a signal.
    """
    signals: queue.SimpleQueue[None] = queue.SimpleQueue()
    with operator_channel(config, directory) as control, handlers_restored():
        on_signal(lambda: signals.put(None))  # a signal handler must not use the locks of the channel
        roll(control, directory, request, say, signals)


def roll(
    control: ControlChannel,
    directory: str,
    request: m.Roll,
    say: Callable[[str], None],
    signals: queue.SimpleQueue[None],
) -> None:
    """Rolls the groups of `directory`; starts the channel `control`. An entry of `signals` stops the roll.

    Raises as `run_roll`.
    """
    replies: queue.SimpleQueue[m.Message | None] = queue.SimpleQueue()

    def on_message(peer: str, message: m.Message) -> None:
        if peer == directory and isinstance(message, m.RollStep | m.Rolled):
            replies.put(message)

    control.start(on_message, lambda peer: replies.put(None))
    control.watch(directory)
    control.send(directory, request)
    stopped = False
    while True:
        if not signals.empty():
            signals.get()
            if stopped:
                raise KeyboardInterrupt
            stopped = True
            say(
                "stopping as soon as the usual number of groups serves; a second signal ends this command at once"
            )
            control.send(directory, m.StopRoll())
        try:
            reply = replies.get(timeout=LOOK_S)
        except queue.Empty:
            continue
        match reply:
            case m.RollStep():
                say(reply.text)
            case m.Rolled():
                _end(reply, say, stopped)
                return
            case _:
                raise PeerLostError(
                    f"no directory answers at {directory}: is `disagg launch` running there? Its groups continue, "
                    f"and the same command continues the roll"
                )


def _end(reply: m.Rolled, say: Callable[[str], None], stopped: bool) -> None:
    if not reply.error:
        say(f"all groups have the new settings: {', '.join(reply.new)}")
        return
    groups = f"new groups: {', '.join(reply.new) or 'none'}; old groups: {', '.join(reply.old) or 'none'}"
    if stopped:
        say(f"{reply.error}. {groups}. All of them serve; the same command continues the roll")
        raise KeyboardInterrupt
    if not reply.new and not reply.old:  # refused before the first step
        raise DisaggError(reply.error)
    raise DisaggError(f"{reply.error} ({groups}; all of them serve, and the same command continues the roll)")
