"""`disagg serve`: flags to a `Config`, then over to `disagg.serve_http`."""

from __future__ import annotations

from typing import Annotated

import typer

from disagg.cli_run import (
    ChunkTokensFlag,
    ColocatedFlag,
    ConfigFlag,
    DecodePageFlag,
    DecodeTpFlag,
    DeviceFlag,
    DTypeFlag,
    GroupsFlag,
    JoinFlag,
    ModelFlag,
    PrefillPageFlag,
    PrefillTpFlag,
    RandomInitFlag,
    RayFlag,
    RingBytesFlag,
    SetFlag,
    TpFlag,
    TransportFlag,
    configuration,
)
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


def serve(
    model: ModelFlag = None,
    random_init: RandomInitFlag = None,
    dtype: DTypeFlag = None,
    prefill_tp: PrefillTpFlag = None,
    decode_tp: DecodeTpFlag = None,
    colocated: ColocatedFlag = False,
    tp: TpFlag = None,
    groups: GroupsFlag = None,
    device: DeviceFlag = None,
    host: HostFlag = None,
    port: PortFlag = None,
    api_key_file: ApiKeyFileFlag = None,
    model_name: ModelNameFlag = None,
    config: ConfigFlag = None,
    settings: SetFlag = None,
    chunk_tokens: ChunkTokensFlag = None,
    prefill_page_size: PrefillPageFlag = None,
    decode_page_size: DecodePageFlag = None,
    ring_bytes: RingBytesFlag = None,
    transport: TransportFlag = None,
    ray: RayFlag = None,
    join: JoinFlag = None,
) -> None:
    """Serve a model over HTTP, with OpenAI's API, until SIGINT or SIGTERM."""
    settled = configuration(dict(locals()))  # the flags by parameter name, before anything else is assigned
    if join is not None and ray is not None:
        raise ConfigError("--join and --ray: groups that run already are joined, or new ones are placed")
    if join is not None and colocated:
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
