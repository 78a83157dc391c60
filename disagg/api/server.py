"""The HTTP server: uvicorn on a given socket. The caller stops the server; uvicorn handles no signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from disagg.api.connections import bounded_http, check_file_limit
from disagg.api.service import Service

log = structlog.get_logger(__name__)

BACKLOG = 4096
"""Connections that the kernel queues until the event loop accepts them; `net.core.somaxconn` limits the number."""
LAST_BYTES_S = 5
"""Seconds after the end of the last answers in which their remaining bytes are sent; then connections are closed."""


async def serve(
    app: ASGIApp,
    service: Service,
    listener: socket.socket,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    on_listening: Callable[[str], None],
) -> None:
    """Serves until `stop` is set; then refuses new requests, waits for running answers, and returns.

    Running answers are aborted after `api.drain_timeout_s`, or when `stop_now` is set. `on_listening`
    receives the URL. Closes `listener`.
    """
    config = service.config
    check_file_limit(config)
    server = _Server(_settings(app, service), lambda: on_listening(_url(listener)))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    await _first(serving, stop.wait())
    service.stopping = True
    if not serving.done():
        log.info("stopping", drain_timeout_s=config.drain_timeout_s)
        await _drain(service, stop_now)
    server.should_exit = True
    await serving


async def _drain(service: Service, stop_now: asyncio.Event) -> None:
    draining = asyncio.create_task(service.drain(service.config.drain_timeout_s))
    await _first(draining, stop_now.wait())
    if not draining.done():
        draining.cancel()
        await asyncio.wait([draining])
        await service.drain(0.0)
    elif not draining.result():
        log.warning("answers_aborted", reason="they did not end within api.drain_timeout_s")


async def _first(task: asyncio.Task[Any], other: Any) -> None:
    """Waits until `task` is done or `other` returns; does not cancel `task`."""
    waiter = asyncio.create_task(other)
    await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    waiter.cancel()
    await asyncio.wait([waiter])


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, on_listening: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_listening = on_listening

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_listening()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield  # the caller handles signals: after the first signal, the open socket refuses requests


def _settings(app: ASGIApp, service: Service) -> uvicorn.Config:
    config = service.config
    return uvicorn.Config(
        app,
        http=bounded_http(config, service.metrics),
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.idle_timeout_s,
        backlog=BACKLOG,
        timeout_graceful_shutdown=LAST_BYTES_S,
    )


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
