"""Measures the floor of a router's CPU time, with a server without an engine and a channel without a router."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from typing import Any

import uvicorn
import uvloop
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from disagg.core.config.read import ControlConfig
from transport.control import messages as m
from transport.control.zmq import make_control
from transport.keys.ring import KeyRing

_TRANSPORTS: list[Any] = []


class _FloorHttp(HttpToolsProtocol):
    """uvicorn's HTTP protocol, with a list of all open connections."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        _TRANSPORTS.append(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        _TRANSPORTS.remove(self.transport)
        super().connection_lost(exc)


class FloorServer:
    """A server without an engine: streams the same events as the router, from prepared chunks."""

    def __init__(self, chunk: bytes, config: ControlConfig) -> None:
        """`chunk`: the bytes of one event, as sent by the API. `config` contains the path of the key file."""
        self._event = chunk
        self._chunk = b"%x\r\n%b\r\n" % (len(chunk), chunk)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        settings = uvicorn.Config(
            self._app,
            http=_FloorHttp,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
        )
        self._server = uvicorn.Server(settings)
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="floor")
        self._thread.start()
        self._received = 0
        self._arrived = threading.Condition()
        self._control = make_control(config, KeyRing.follow(config.key_file or ""))
        self._control.start(self._on_message, lambda peer: None)

    def where(self) -> tuple[int, int, str]:
        """Returns this process's id, the HTTP port and the control address."""
        return os.getpid(), self._listener.getsockname()[1], self._control.address

    def write(self, steps: int, steps_per_s: float) -> None:
        """Writes `steps` chunks to each open connection, at `steps_per_s`."""
        asyncio.run_coroutine_threadsafe(self._write(steps, 1 / steps_per_s), self._loop).result()

    def wait_messages(self, count: int, timeout_s: float) -> None:
        """Waits until `count` control messages have been received in total. Raises TimeoutError after `timeout_s`."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: self._received >= count, timeout_s):
                raise TimeoutError(f"{self._received} of {count} messages received")

    def close(self) -> None:
        """Ends server and channel."""
        self._control.close()
        self._server.should_exit = self._server.force_exit = True
        self._thread.join()

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._server.serve([self._listener]))

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        body = await receive()
        await send(
            {
                "type": "http.response.start",
                "status": 200,
                "headers": [(b"content-type", b"text/event-stream")],
            }
        )
        await send({"type": "http.response.body", "body": self._event, "more_body": True})
        if b'"max_tokens":2,' in body["body"]:
            await send({"type": "http.response.body", "body": self._event, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        while (await receive())["type"] != "http.disconnect":
            pass

    async def _write(self, steps: int, pause_s: float) -> None:
        due_s = self._loop.time()
        for _ in range(steps):
            due_s += pause_s
            for transport in _TRANSPORTS:
                transport.write(self._chunk)
            await asyncio.sleep(due_s - self._loop.time())

    def _on_message(self, peer: str, message: m.Message) -> None:
        with self._arrived:
            self._received += 1
            self._arrived.notify_all()
