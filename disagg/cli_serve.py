"""`disagg serve`: flags to a `Config`, then over to `disagg.serve_http`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from disagg.cli_group_flags import with_group_flags
from disagg.cli_run import JoinFlag, configuration
from disagg.core.errors import ConfigError

HostFlag = Annotated[
    str | None, typer.Option("--host", help="Address to listen on [127.0.0.1]; 0.0.0.0 is every one.")
]
PortFlag = Annotated[int | None, typer.Option("--port", help="Port; 0 takes a free one [8000].")]
ApiKeyFileFlag = Annotated[
    str | None,
    typer.Option(
        "--api-key-file", metavar="FILE", help="API keys, one a line; more from DISAGG_API_KEYS (by commas)."
    ),
]
ModelNameFlag = Annotated[
    str | None, typer.Option("--model-name", metavar="NAME", help="What clients call the model [its folder].")
]


@with_group_flags
def serve(
    given: Mapping[str, Any],
    host: HostFlag = None,
    port: PortFlag = None,
    api_key_file: ApiKeyFileFlag = None,
    model_name: ModelNameFlag = None,
    join: JoinFlag = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, until SIGINT or SIGTERM."""
    settled = configuration(given)
    if join is not None and given["ray"] is not None:
        raise ConfigError("--join and --ray: groups that run already are joined, or new ones are placed")
    if join is not None and given["colocated"]:
        raise ConfigError(
            "--join and --colocated: groups that run already are what `disagg launch` made them"
        )
    # It brings torch and transformers along.
    if join is None:
        from disagg.serve_http import run_serve

        run_serve(settled)
    else:
        from disagg.serve_http import run_serve_joined

        run_serve_joined(settled, join)
