"""`disagg top`: flags for `disagg.top`."""

from __future__ import annotations

import contextlib
from typing import Annotated

import typer

from disagg.cli.flags import ApiKeyFlag
from disagg.core.errors import ConfigError
from disagg.core.key_file import first_key


def top(
    url: Annotated[str, typer.Option("--url", help="Base URL of the server.")] = "http://127.0.0.1:8000",
    api_key_file: ApiKeyFlag = None,
    interval_s: Annotated[float, typer.Option("--interval-s", help="Seconds between two samples.")] = 1.0,
    once: Annotated[
        bool, typer.Option("--once", help="Print one view after one interval, then exit.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the server's status once, as JSON.")] = False,
) -> None:
    """Show a server's current requests, groups and transfers. Ctrl-C ends it."""
    if not 0.1 <= interval_s <= 3600:
        raise ConfigError(f"--interval-s {interval_s:g}: give 0.1 to 3600 seconds")
    from disagg.top.client import StatusClient

    api_key = None if api_key_file is None else first_key("--api-key-file", api_key_file)
    with StatusClient(url, api_key) as client:
        if as_json:
            print(client.status_json().decode())
            return
        from disagg.top.watch import console, show_once, watch

        if once:
            show_once(client, interval_s, console())
        else:
            with contextlib.suppress(KeyboardInterrupt):
                watch(client, interval_s, console())
