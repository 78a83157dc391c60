"""`disagg serve`: runs the HTTP API, either with a cluster that the command starts, or (`--join`) with a running one.

A signal stops the API first, then the cluster that this command started.
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
from disagg.cluster.directory import directory_host
from disagg.cluster.keys import join_keys
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.supervisor import supervised
from disagg.commands.failure import raise_failure
from disagg.commands.local import (
    follow_cluster,
    limit_tokens,
    local_cluster,
    local_router,
    with_model,
)
from disagg.commands.signals import SIGNALS, handlers_restored, ignore_signals
from disagg.core.collection import collect_requests_only
from disagg.core.config.read import ApiConfig, Config
from disagg.core.errors import ConfigError
from disagg.core.log import configure
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.model.load.tokenizer import load_tokenizer
from disagg.node.assemble import make_source
from disagg.node.rank import SWITCH_INTERVAL_S
from disagg.report.choices import choices, choices_table
from disagg.router.follow import joined
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching
from disagg.sockets.guards import log_own_sockets
from transport.control.zmq import make_control
from transport.hosts import is_loopback
from transport.keys.ring import KeyRing

log = structlog.get_logger(__name__)


def run_serve(config: Config) -> None:
    """Starts the cluster, serves until SIGINT or SIGTERM, then drains; a second signal aborts running requests.

    Raises `DisaggError` when the whole cluster failed, so that a service manager starts the command again. Raises
    `ConfigError` for bad keys, address, model or tracing before anything starts, and `KeyboardInterrupt` for a
    signal during the start.
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
                sys.setswitchinterval(SWITCH_INTERVAL_S)  # the tokenizer's thread shares the GIL
                _print_choices(config, cluster, console)
                _run(_serve(_own_router(cluster), cluster.config, model, keys, tracing, listener, cluster))
                ignore_signals()  # the shutdown takes seconds
                raise_failure(cluster)
        finally:
            model.close()


def run_serve_joined(config: Config, directory: str) -> None:
    """Runs `run_serve` with the groups of the directory at `directory`, `tcp://HOST:PORT`."""
    configure(config.log)
    keys = _api_keys(config.api)
    directory_host(directory, config.control)  # rejects a malformed address first
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


def _print_choices(given: Config, cluster: Cluster, console: Console) -> None:
    infos, config = cluster.infos(), cluster.config
    console.print(choices_table(choices(given, config, infos, config.api.running_limit(infos))))


def _api_keys(config: ApiConfig) -> tuple[bytes, ...]:
    """Returns the API keys. Raises `ConfigError` if there is no key and other machines can reach the address."""
    keys = load_api_keys(config.key_file, os.environ)
    if not keys and not is_loopback(config.host):
        if not config.allow_no_key:
            raise ConfigError(
                f"api.host = {config.host!r} lets other machines connect, and there is no API key: give "
                f"--api-key-file or {VARIABLE}, or serve without keys with --set api.allow_no_key=true"
            )
        log.warning(
            "no_api_key", host=config.host, means="every client that reaches this address may use the model"
        )
    return keys


def _run(main: Coroutine[Any, Any, None]) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def served_model(config: Config) -> ServedModel:
    """Returns name, tokenizer and limits of the configured model. The caller closes it."""
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
    source = make_source(config)
    fingerprint = await asyncio.to_thread(lambda: source.fingerprint)  # may read all weights

    def usable(group: GroupInfo) -> bool:
        ours = group.fingerprint == fingerprint and group.protocol_version == PROTOCOL_VERSION
        if not ours:
            log.error("group_not_usable", group=group.name, why="another model or release than this router's")
        return ours

    dispatcher = ResponseDispatcher(
        make_control(config.control, keys, config.control.router_port), asyncio.get_running_loop()
    )
    dispatcher.start()
    try:
        router = Router(dispatcher, config=config.router)
        async with joined(dispatcher, router, directory, usable):
            yield router
    finally:
        dispatcher.close()


async def _serve(
    made: AbstractAsyncContextManager[Router],
    config: Config,
    model: ServedModel,
    keys: tuple[bytes, ...],
    tracing: Tracing | None,
    listener: socket.socket,
    cluster: Cluster | None = None,
) -> None:
    """Serves until a signal arrives or `cluster` fails, the cluster that this process started, if any."""
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, lambda: (stop_now if stop.is_set() else stop).set())

    def on_failed() -> None:
        for event in (stop, stop_now):
            loop.call_soon_threadsafe(event.set)

    if cluster is not None:
        cluster.on_failed(on_failed)
    ranks = [rank for info in cluster.infos() for rank in info.ranks] if cluster is not None else []

    def on_listening(url: str) -> None:
        log.info(
            "serving", url=url, model=model.name, context_tokens=model.context_tokens, api_keys=len(keys)
        )
        log_own_sockets(ranks, descendants=True)

    async with made as router, watching(router.statuses, config.metrics.interval_s):
        service = Service(router, model, config.api)
        router.on_groups_changed(service.follow_groups)
        collect_requests_only()
        await serve(make_app(service, keys, tracing), service, listener, stop, stop_now, on_listening)
