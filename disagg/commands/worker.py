"""A worker process of `disagg serve --workers`: a router with its own control channel and its own listening socket.

The new process imports this module first. transformers is imported later, when `run_worker` has disabled SIGINT:
during this import, a SIGINT would print a traceback. A worker does not import torch.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import msgspec

from disagg.core.config.read import Config
from disagg.core.errors import DisaggError

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from disagg.commands.router_server import ServerParts
    from disagg.router.router import Router

FACTS = "model"
"""File with the pickled `ModelFacts`, which a parent with a larger tokenizer than a pipe holds cannot send through it
without blocking."""
Order = Literal["drain", "abort"]
"""Message of the parent to a worker. If the parent ends, its pipe closes, which counts as `drain`."""
News = str | DisaggError
"""Message of a worker to the parent: the URL at which the worker listens, or the error that ends the worker."""


@dataclass(frozen=True)
class WorkerSettings:
    """Arguments of a worker process."""

    config: Config
    """The server's configuration, with the port of the HTTP API that the parent has reserved."""
    fingerprint: str
    """Digest of the model's weights and configuration."""
    directory: str
    """Control address of the directory of groups."""
    folder: Path
    """Private folder of the workers: for their unix sockets, and with the file `FACTS`."""
    worker: int
    """Number of the worker, from 0."""


def run_worker(pipe: Connection, settings: WorkerSettings) -> None:
    """Serves until the parent sends an order, or until SIGTERM. Reports a `DisaggError` to the parent."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal also sends SIGINT to the parent, which then sends an order
    try:
        _run(pipe, settings)
    except DisaggError as error:
        pipe.send(error)


def _run(pipe: Connection, settings: WorkerSettings) -> None:
    import os
    import pickle
    import sys

    import structlog

    from disagg.api.listener import bind
    from disagg.api.tracing import traced
    from disagg.api.workers import Share, Siblings
    from disagg.cluster.keys import join_keys
    from disagg.commands.router_server import (
        ModelFacts,
        ServerParts,
        api_keys,
        joined_router,
        run_loop,
        served_model,
    )
    from disagg.core.collection import imports_frozen
    from disagg.core.log import configure
    from disagg.core.threads import SWITCH_INTERVAL_S

    config = _with_own_port(settings)
    configure(config.log)
    structlog.contextvars.bind_contextvars(worker=settings.worker)
    control_keys = join_keys(config.control, settings.directory, os.environ)
    siblings = Siblings(Share(settings.worker, config.api.workers), settings.folder)
    with traced(config.metrics) as tracing, bind(config.api, shared=True) as listener:
        with imports_frozen():
            facts: ModelFacts = pickle.loads((settings.folder / FACTS).read_bytes())
        model = served_model(config, facts)
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # the tokenizer's thread shares the GIL
        try:
            parts = ServerParts(config, model, api_keys(config.api), tracing, listener, siblings)
            made = joined_router(config, control_keys, settings.directory, lambda: settings.fingerprint)
            run_loop(_serve(pipe, made, parts))
        finally:
            model.close()


def _with_own_port(settings: WorkerSettings) -> Config:
    """Returns the configuration with the worker's own control port: the fixed port plus the worker's number."""
    config = settings.config
    if not config.control.router_port:
        return config
    port = config.control.router_port + settings.worker
    return msgspec.structs.replace(config, control=msgspec.structs.replace(config.control, router_port=port))


async def _serve(pipe: Connection, made: AbstractAsyncContextManager[Router], parts: ServerParts) -> None:
    import asyncio

    from disagg.commands.router_server import Stop, serve_router
    from disagg.sockets.guards import log_own_sockets

    loop, stop = asyncio.get_running_loop(), Stop()

    def on_order() -> None:
        try:
            order: Order = pipe.recv()
        except (EOFError, OSError):  # the parent was killed
            loop.remove_reader(pipe.fileno())
            order = "drain"
        stop.drain.set()
        if order == "abort":
            stop.now.set()

    def on_listening(url: str) -> None:
        pipe.send(url)
        log_own_sockets(descendants=False)

    loop.add_signal_handler(signal.SIGTERM, stop.drain.set)
    loop.add_reader(pipe.fileno(), on_order)
    await serve_router(made, parts, stop, on_listening)
