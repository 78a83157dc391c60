"""`disagg top`: flags, then over to `disagg.top`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from disagg.core.errors import ConfigError
from disagg.core.key_file import first_key


def top(
    url: Annotated[str, typer.Option("--url", help="Where the server is.")] = "http://127.0.0.1:8000",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Its first line is the key.")
    ] = None,
    interval_s: Annotated[float, typer.Option("--interval-s", help="Between two looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="One picture, after one interval.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines: print the server's status, once.")
    ] = False,
) -> None:
    """Show what a server does now: requests, groups, what moves between them. Ctrl-C ends it."""
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
            watch(client, interval_s, console())
