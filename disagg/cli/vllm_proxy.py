"""`disagg vllm-proxy`: flags for `disagg.vllm.proxy`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from disagg.cli.options import with_options
from disagg.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class VllmProxyOptions:
    """Flags of `disagg vllm-proxy`."""

    prefill: Annotated[
        list[str],
        typer.Option("--prefill", metavar="URL", help="A vLLM server that computes prompts; repeatable."),
    ]
    decode: Annotated[
        list[str], typer.Option("--decode", metavar="URL", help="A vLLM server that generates; repeatable.")
    ]
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1"
    port: Annotated[int, typer.Option("--port", help="Port to listen on; 0 selects a free one.")] = 8000
    at_once: Annotated[
        bool,
        typer.Option(
            "--at-once/--one-after-another",
            help="Send a request to both servers at once, or to prefill first.",
        ),
    ] = True


@with_options(VllmProxyOptions)
def vllm_proxy(options: VllmProxyOptions) -> None:
    """Serve two kinds of vLLM servers with DisaggConnector as one, until SIGINT or SIGTERM."""
    if not 0 <= options.port < 1 << 16:
        raise ConfigError(f"--port {options.port}: give a port from 0 to 65535")
    from disagg.vllm.proxy.run import run_proxy

    run_proxy(options.prefill, options.decode, options.host, options.port, options.at_once)
