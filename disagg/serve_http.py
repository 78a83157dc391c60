"""`disagg serve`: a cluster on this machine and the HTTP API in front of it, until a signal stops both."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import structlog
import torch
import uvloop
from rich.console import Console

from disagg.api.app import make_app
from disagg.api.keys import load_api_keys
from disagg.api.model import ServedModel
from disagg.api.server import bind, serve
from disagg.api.service import Service
from disagg.cluster import Cluster
from disagg.core.config import ApiConfig, Config
from disagg.core.log import configure
from disagg.node.assemble import make_source
from disagg.node.rank import SWITCH_INTERVAL_S
from disagg.serve_local import limit_tokens, load_tokenizer, local_cluster, local_router, with_model

log = structlog.get_logger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_serve(config: Config) -> None:
    """Starts the cluster, serves until SIGINT or SIGTERM, and stops gracefully; a second signal aborts what runs.

    Raises `ConfigError` before anything starts for keys, address or model that cannot be used, and
    `KeyboardInterrupt` for a signal that comes before it serves.
    """
    configure(config.log)
    console = Console(stderr=True)
    keys = load_api_keys(config.api.key_file, os.environ)
    config = with_model(config, console.print)
    with _handlers_restored(), bind(config.api) as listener:
        model = served_model(config)
        try:
            with console.status("starting") as status, local_cluster(config, status.update) as cluster:
                status.stop()
                sys.setswitchinterval(
                    SWITCH_INTERVAL_S
                )  # the tokenizer's thread shares Python's lock with us
                with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                    runner.run(_serve(cluster, model, keys, listener))
                for number in SIGNALS:  # the cluster's end takes seconds, and must not be cut short
                    signal.signal(number, signal.SIG_IGN)
        finally:
            model.close()


def served_model(config: Config) -> ServedModel:
    """Name, tokenizer and limits of the configured model. The caller closes it."""
    source = make_source(config)
    name = config.api.model_name or (source.directory.resolve().name if source.directory else source.name)
    return ServedModel(
        name,
        load_tokenizer(source),
        context_tokens=limit_tokens(config, source),
        vocab_tokens=source.spec(torch.float32).vocab_size,
    )


async def _serve(
    cluster: Cluster, model: ServedModel, keys: tuple[bytes, ...], listener: socket.socket
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())

    def say(url: str) -> None:
        log.info(
            "serving", url=url, model=model.name, context_tokens=model.context_tokens, api_keys=len(keys)
        )

    config = cluster.config.api
    if not keys and not _only_this_machine(config):
        log.warning("no_api_key", host=config.host, means="whoever reaches this address may use the model")
    async with local_router(cluster) as router:
        service = Service(router, model, config)
        await serve(make_app(service, keys), service, listener, stop, hurry, say)


def _only_this_machine(config: ApiConfig) -> bool:
    try:
        return ipaddress.ip_address(config.host).is_loopback
    except ValueError:
        return config.host == "localhost"


@contextmanager
def _handlers_restored() -> Iterator[None]:
    """Within the block SIGTERM interrupts as Ctrl-C does; afterwards both do what they did."""
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
