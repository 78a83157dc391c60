"""`disagg serve`: runs the HTTP API with a cluster that the command starts, or (`--join`) with a running cluster.

A signal stops first the API, then the cluster that this command started. With several workers this process serves no
requests: it starts the workers and a directory of its cluster's groups, and the workers join that directory.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from functools import partial

import structlog
from rich.console import Console

from disagg.api.listener import bind
from disagg.api.tracing import traced
from disagg.api.workers import Share, Siblings
from disagg.cluster.directory import Directory, directory_host
from disagg.cluster.keys import join_keys, launch_keys, published
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.supervisor import supervised
from disagg.commands.early import require_joined_model
from disagg.commands.failure import raise_failure
from disagg.commands.local import (
    follow_cluster,
    local_cluster,
    local_router,
    placed_cluster,
    started_ray,
    with_model,
)
from disagg.commands.router_server import (
    ServerParts,
    Stop,
    api_keys,
    joined_router,
    model_facts,
    model_fingerprint,
    run_loop,
    serve_router,
    served_model,
)
from disagg.commands.signals import SIGNALS, ignore_signals, start_interruptible
from disagg.commands.workers import run_workers, worker_model
from disagg.core.config.read import Config, Role
from disagg.core.log import configure
from disagg.core.threads import SWITCH_INTERVAL_S
from disagg.node.host_memory import HostCacheSize
from disagg.report.choices import choices, choices_table
from disagg.router.router import Router
from disagg.sockets.guards import log_own_sockets
from transport.control.zmq import make_control

log = structlog.get_logger(__name__)


def run_serve(config: Config) -> None:
    """Starts the cluster, serves until SIGINT or SIGTERM, then drains; a second signal aborts running requests.

    Raises `DisaggError` if the whole cluster fails, so that a service manager starts the command again. Raises
    `ConfigError` for bad keys, address, model or tracing before any rank starts, and `KeyboardInterrupt` for a
    signal during the start.
    """
    configure(config.log)
    if config.api.workers > 1:
        _serve_with_workers(config)
        return
    console = Console(stderr=True)
    keys = api_keys(config.api)
    config = with_model(config, console.print)
    with (
        start_interruptible(),
        traced(config.metrics) as tracing,
        bind(config.api) as listener,
        console.status("starting") as status,
        started_ray(config, status.update) as private,
    ):
        model = served_model(config, model_facts(config))
        try:
            with local_cluster(config, status.update, private) as cluster:
                status.stop()
                sys.setswitchinterval(SWITCH_INTERVAL_S)  # the tokenizer's thread shares the GIL
                _print_choices(config, cluster, console)
                parts = ServerParts(cluster.config, model, keys, tracing, listener, Siblings(Share()))
                run_loop(_serve(_own_router(cluster), parts, cluster))
                ignore_signals()  # the shutdown takes seconds
                raise_failure(cluster)
        finally:
            model.close()


def run_serve_joined(config: Config, directory: str) -> None:
    """Serves as `run_serve` does, with the groups that the directory at `directory`, `tcp://HOST:PORT`, announces.

    Raises `ConfigError` if no model is configured: the router needs its tokenizer, and uses only groups that run it.
    """
    configure(config.log)
    keys = api_keys(config.api)
    directory_host(directory, config.control)  # rejects a malformed address first
    require_joined_model(config.model)
    control_keys = join_keys(config.control, directory, os.environ)
    with start_interruptible(), bind(config.api) as listener:
        if config.api.workers > 1:
            copied = worker_model(config, model_fingerprint(config))
            run_loop(run_workers(config, copied, directory, listener))
            return
        with traced(config.metrics) as tracing:
            model = served_model(config, model_facts(config))
            sys.setswitchinterval(SWITCH_INTERVAL_S)
            try:
                parts = ServerParts(config, model, keys, tracing, listener, Siblings(Share()))
                fingerprint_of = partial(model_fingerprint, config)
                made = joined_router(config, control_keys, directory, fingerprint_of)
                run_loop(_serve(made, parts))
            finally:
                model.close()


def _serve_with_workers(config: Config) -> None:
    """Starts a cluster, and several workers that join it; returns after a signal. See `run_serve`."""
    console = Console(stderr=True)
    api_keys(config.api)  # rejects bad keys before the cluster starts
    config = with_model(config, console.print)
    with (
        start_interruptible(),
        bind(config.api) as listener,
        _announced_cluster(config, console) as (cluster, directory),
    ):
        log_own_sockets([rank for info in cluster.infos() for rank in info.ranks], descendants=True)
        model = worker_model(cluster.config, cluster.infos()[0].fingerprint)
        run_loop(run_workers(cluster.config, model, directory, listener, cluster.on_failed))
        ignore_signals()  # the shutdown takes seconds
        raise_failure(cluster)


@contextmanager
def _announced_cluster(config: Config, console: Console) -> Iterator[tuple[Cluster, str]]:
    """Starts a cluster and a directory of its groups, on a free port; yields cluster and directory address."""
    keys = launch_keys(config.control)
    directory = Directory(make_control(config.control, keys))
    directory.start()
    try:
        with (
            published(keys, config.control, directory.address, os.environ),
            console.status("starting") as status,
            placed_cluster(config, keys, status.update) as cluster,
            supervised(cluster, directory.announce, directory.wait_unused),
        ):
            status.stop()
            _print_choices(config, cluster, console)
            yield cluster, directory.address
    finally:
        directory.close()


def _print_choices(given: Config, cluster: Cluster, console: Console) -> None:
    infos, config = cluster.infos(), cluster.config
    sizes: dict[Role, list[HostCacheSize]] = {}
    for group in cluster.groups:
        sizes.setdefault(group.role, []).extend(rank.host_cache for rank in group.started)
    host_caches = {role: min(found) for role, found in sizes.items()}
    limit = config.api.running_limit(infos)
    console.print(choices_table(choices(given, config, infos, limit, host_caches)))


@asynccontextmanager
async def _own_router(cluster: Cluster) -> AsyncIterator[Router]:
    async with local_router(cluster) as router:
        with supervised(cluster, follow_cluster(router)):
            yield router


async def _serve(
    made: AbstractAsyncContextManager[Router], parts: ServerParts, cluster: Cluster | None = None
) -> None:
    """Serves until a signal arrives, or until `cluster` fails, if this process has started one."""
    stop, loop = Stop(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.request)

    def on_failed() -> None:
        for event in (stop.drain, stop.now):
            loop.call_soon_threadsafe(event.set)

    if cluster is not None:
        cluster.on_failed(on_failed)
    ranks = [rank for info in cluster.infos() for rank in info.ranks] if cluster is not None else []
    model = parts.model

    def on_listening(url: str) -> None:
        log.info(
            "serving",
            url=url,
            model=model.name,
            context_tokens=model.context_tokens,
            api_keys=len(parts.keys),
        )
        log_own_sockets(ranks, descendants=True)

    await serve_router(made, parts, stop, on_listening)
