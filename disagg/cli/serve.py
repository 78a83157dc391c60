"""`disagg serve`: converts flags to a `Config` for `disagg.commands.serve`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.flags import ClusterFlags, JoinFlag, Sets
from disagg.cli.imports import heavy_imports
from disagg.cli.options import with_options
from disagg.cli.settings import configuration
from disagg.commands.early import check_serve, pinned
from disagg.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """Flags of `disagg serve`."""

    folder: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="The model's folder or name, as --model MODEL.")
    ] = None
    cluster: ClusterFlags
    host: Annotated[
        str | None,
        typer.Option("--host", help="Address to listen on [127.0.0.1]; 0.0.0.0 is every interface."),
        Sets(("api.host",)),
    ] = None
    port: Annotated[
        int | None, typer.Option("--port", help="Port; 0 selects a free one [8000]."), Sets(("api.port",))
    ] = None
    workers: Annotated[
        int | None,
        typer.Option("--workers", metavar="N", help="Router processes that share the port [1]."),
        Sets(("api.workers",)),
    ] = None
    api_key_file: Annotated[
        str | None,
        typer.Option(
            "--api-key-file",
            metavar="FILE",
            help="API keys, one a line; DISAGG_API_KEYS adds more, separated by commas.",
        ),
        Sets(("api.key_file",)),
    ] = None
    model_name: Annotated[
        str | None,
        typer.Option(
            "--model-name",
            "--served-model-name",
            metavar="NAME",
            help="The model's name in the API [its name on the hub, or the name of its folder].",
        ),
        Sets(("api.model_name",)),
    ] = None
    join: JoinFlag = None


@with_options(ServeOptions)
def serve(options: ServeOptions) -> None:
    """Serve a model over HTTP, with OpenAI's and Anthropic's API, until SIGINT or SIGTERM."""
    given = options.cluster.weights
    if options.folder is not None and (given.model is not None or given.random_init is not None):
        other = "--model" if given.model is not None else "--random-init"
        raise ConfigError(f"{options.folder} and {other}: give the model once")
    extra = {} if options.folder is None else {"model.path": options.folder}
    config = configuration(options.cluster.source, options, extra)
    if options.join is not None and options.cluster.ray is not None:
        raise ConfigError("--join and --ray: --join uses running groups, --ray places new ones; omit one")
    if options.join is not None and options.cluster.colocated:
        raise ConfigError(
            "--join and --colocated: `disagg launch` sets the mode of the groups; omit --colocated"
        )
    check_serve(config, options.join)
    config = pinned(config)
    # The module imports torch and transformers.
    if options.join is None:
        with heavy_imports():
            from disagg.commands.serve import run_serve

        run_serve(config)
    else:
        with heavy_imports():
            from disagg.commands.serve import run_serve_joined

        run_serve_joined(config, options.join)
