"""Queries the status of a server periodically until Ctrl-C, and shows each sample."""

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
"""Width of the output in characters if stdout is no terminal. Every column fits."""


def console() -> Console:
    """Returns a rich console on stdout; `PLAIN_WIDTH` wide if stdout is no terminal."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=PLAIN_WIDTH)


def show_once(client: StatusClient, interval_s: float, on: Console) -> None:
    """Shows one view after `interval_s`, with rates over this time. Raises the errors of `StatusClient.status`."""
    before = client.status()
    time.sleep(interval_s)
    on.print(picture(append([before], client.status()), on.width))


def watch(client: StatusClient, interval_s: float, on: Console) -> None:
    """Shows a view every `interval_s` until Ctrl-C: in place on a terminal, otherwise one view below another.

    Raises the error of the first query (`StatusClient.status`). Later errors are shown, and the query is repeated.
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
    """Queries the server after each `wait()`. Yields the samples so far, and the error of the query or ""."""
    while True:
        wait()
        trouble = ""
        try:
            pictures = append(pictures, client.status())
        except DisaggError as exc:
            trouble = str(exc)
        yield pictures, trouble
