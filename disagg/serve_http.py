"""`disagg serve`: the HTTP API in front of a cluster of its own, or (`--join`) of one that runs elsewhere.

Until a signal stops it: first what is in front, then the cluster if it is ours.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import structlog
import torch
import uvloop
from rich.console import Console

from disagg.api.app import make_app
from disagg.api.keys import VARIABLE, load_api_keys
from disagg.api.model import ServedModel
from disagg.api.server import bind, serve
from disagg.api.service import Service
from disagg.api.tracing import Tracing, traced
from disagg.cluster_keys import join_keys
from disagg.cluster_life import Cluster
from disagg.core.config import ApiConfig, Config
from disagg.core.errors import ConfigError
from disagg.core.log import configure
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.directory import directory_host
from disagg.model.tokenizer import load_tokenizer
from disagg.node.assemble import make_source
from disagg.node.rank import SWITCH_INTERVAL_S
from disagg.router.follow import joined
from disagg.router.mail import MailRoom
from disagg.router.router import Router
from disagg.router.status import watching
from disagg.serve_local import (
    follow_cluster,
    limit_tokens,
    local_cluster,
    local_router,
    make_router,
    with_model,
)
from disagg.signals import SIGNALS, handlers_restored, ignore_signals
from disagg.sockets.guards import log_own_sockets
from disagg.supervisor import supervised
from transport.control_zmq import make_control
from transport.hosts import is_loopback
from transport.key_ring import KeyRing

log = structlog.get_logger(__name__)


def run_serve(config: Config) -> None:
    """Starts the cluster, serves until SIGINT or SIGTERM, and stops gracefully; a second signal aborts what runs.

    Raises `ConfigError` before anything starts for keys, address, model or tracing that cannot be used, and
    `KeyboardInterrupt` for a signal that comes before it serves.
    """
    configure(config.log)
    console = Console(stderr=True)
    keys = _api_keys(config.api)
    config = with_model(config, console.print)
    with handlers_restored(), traced(config.metrics) as tracing, bind(config.api) as listener:
        model = served_model(config)
        try:
            with console.status("starting") as status, local_cluster(config, status.update) as cluster:
                status.stop()
                sys.setswitchinterval(
                    SWITCH_INTERVAL_S
                )  # the tokenizer's thread shares Python's lock with us
                _run(_serve(_own_router(cluster), cluster.config, model, keys, tracing, listener))
                ignore_signals()  # the cluster's end takes seconds
        finally:
            model.close()


def run_serve_joined(config: Config, directory: str) -> None:
    """Serves with the groups that the directory at `directory`, `tcp://HOST:PORT`, tells of; else as `run_serve`."""
    configure(config.log)
    keys = _api_keys(config.api)
    directory_host(directory, config.control)  # an address that is none is refused first
    control_keys = join_keys(config.control, directory, os.environ)
    config = with_model(config, Console(stderr=True).print)
    with handlers_restored(), traced(config.metrics) as tracing, bind(config.api) as listener:
        model = served_model(config)
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            router = _joined_router(config, control_keys, directory)
            _run(_serve(router, config, model, keys, tracing, listener))
        finally:
            model.close()


def _api_keys(config: ApiConfig) -> tuple[bytes, ...]:
    """The keys that clients need. Raises `ConfigError` for none on an address that other machines reach."""
    keys = load_api_keys(config.key_file, os.environ)
    if not keys and not is_loopback(config.host):
        if not config.allow_no_key:
            raise ConfigError(
                f"api.host = {config.host!r} lets other machines connect, and there is no API key: give "
                f"--api-key-file or {VARIABLE}, or serve everybody with --set api.allow_no_key=true"
            )
        log.warning("no_api_key", host=config.host, means="whoever reaches this address may use the model")
    return keys


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


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


@asynccontextmanager
async def _own_router(cluster: Cluster) -> AsyncIterator[Router]:
    async with local_router(cluster) as router:
        with supervised(cluster, follow_cluster(router)):
            yield router


@asynccontextmanager
async def _joined_router(config: Config, keys: KeyRing, directory: str) -> AsyncIterator[Router]:
    fingerprint = make_source(config).fingerprint

    def usable(group: GroupInfo) -> bool:
        ours = group.fingerprint == fingerprint and group.protocol_version == PROTOCOL_VERSION
        if not ours:
            log.error("group_not_usable", group=group.name, why="another model or release than this router's")
        return ours

    mail = MailRoom(
        make_control(config.control, keys, config.control.router_port), asyncio.get_running_loop()
    )
    mail.start()
    try:
        router = make_router(mail, config.router)
        async with joined(mail, router, directory, usable):
            yield router
    finally:
        mail.close()


async def _serve(
    made: AbstractAsyncContextManager[Router],
    config: Config,
    model: ServedModel,
    keys: tuple[bytes, ...],
    tracing: Tracing | None,
    listener: socket.socket,
) -> None:
    stop, hurry = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: (hurry if stop.is_set() else stop).set())

    def say(url: str) -> None:
        log.info(
            "serving", url=url, model=model.name, context_tokens=model.context_tokens, api_keys=len(keys)
        )
        log_own_sockets(descendants=True)

    async with made as router, watching(router.statuses, config.metrics.interval_s):
        service = Service(router, model, config.api)
        await serve(make_app(service, keys, tracing), service, listener, stop, hurry, say)
