"""Looks at a server again and again, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.live import Live

from disagg.core.errors import DisaggError
from disagg.core.status import ServiceStatus
from disagg.top.client import StatusClient
from disagg.top.rates import append
from disagg.top.view import picture

PLAIN_WIDTH = 140
"""Of a picture that goes into a file: a log has room for every column."""


def console() -> Console:
    """Standard output."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show_once(client: StatusClient, interval_s: float, on: Console) -> None:
    """One picture, whose rates are those of `interval_s` from now. Raises as `StatusClient.status`."""
    before = client.status()
    time.sleep(interval_s)
    on.print(picture(append([before], client.status()), on.width))


def watch(client: StatusClient, interval_s: float, on: Console) -> None:
    """A picture every `interval_s`, in place on a terminal and one below the other elsewhere. Ends with Ctrl-C only.

    Raises as `StatusClient.status` when the server cannot be asked at the start; later that is shown, and it is asked
    again.
    """
    pictures = [client.status()]
    seen = looks(client, pictures, lambda: time.sleep(interval_s))
    if not on.is_terminal:
        for known, trouble in seen:
            on.print(picture(known, on.width, trouble=trouble))
        return
    with Live(console=on, screen=True, auto_refresh=False) as live:
        live.update(picture(pictures, on.width, on.height), refresh=True)
        for known, trouble in seen:
            live.update(picture(known, on.width, on.height, trouble), refresh=True)


def looks(
    client: StatusClient, pictures: list[ServiceStatus], wait: Callable[[], None]
) -> Iterator[tuple[list[ServiceStatus], str]]:
    """After each `wait` what is known then, and why it holds no newer picture, if so."""
    while True:
        wait()
        trouble = ""
        try:
            pictures = append(pictures, client.status())
        except DisaggError as exc:
            trouble = str(exc)
        yield pictures, trouble
