"""HTTP servers that stand in for vLLM's API servers, and the proxy in front of them, in one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from disagg.vllm.proxy.app import PairingProxy

Body = dict[str, Any]
Behaviour = Callable[[Body], Awaitable[Response]]


class FakeVllmServer:
    """Records requests, and answers each by `behaviour`."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour, self.url = behaviour, ""
        self.bodies: list[Body] = []
        self.paths: list[str] = []
        self.headers: list[dict[str, str]] = []
        self.arrived = asyncio.Event()
        self.gone = asyncio.Event()
        """Set when a client closes its connection before the answer."""

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{path:path}", self._answer, methods=["GET", "POST"])])

    async def _answer(self, request: Request) -> Response:
        content = await request.body()
        self.bodies.append(json.loads(content) if content else {})
        self.paths.append(request.url.path + (f"?{request.url.query}" if request.url.query else ""))
        self.headers.append(dict(request.headers))
        self.arrived.set()
        answering = asyncio.ensure_future(self.behaviour(self.bodies[-1]))
        leaving = asyncio.create_task(self._left(request))
        await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        leaving.cancel()
        if not answering.done():
            answering.cancel()
            self.gone.set()
            return Response()
        return answering.result()

    async def _left(self, request: Request) -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass


def prefilled(engine: str = "p") -> Behaviour:
    """A prefill server's answers: the parameters that DisaggConnector returns."""

    async def answer(body: Body) -> Response:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": engine,
            "remote_request_id": "cmpl-1",
            "remote_block_ids": [[1, 2]],
            "remote_host": "10.0.0.1",
            "remote_port": 5580,
            "tp_size": 1,
            "transfer_id": body["kv_transfer_params"]["transfer_id"],
        }
        return JSONResponse({"choices": [], "kv_transfer_params": params})

    return answer


def says(text: str) -> Behaviour:
    async def answer(body: Body) -> Response:
        return JSONResponse({"choices": [{"text": text}]})

    return answer


@contextlib.asynccontextmanager
async def listening(app: Any, servers: list[uvicorn.Server] | None = None) -> AsyncIterator[str]:
    """Serves an ASGI application on a free port; yields its URL. Adds the server to `servers`."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, access_log=False, timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        if servers is not None:
            servers.append(server)
        serving = asyncio.create_task(server._serve(sockets=[listener]))  # noqa: SLF001 - without signal handlers
        while not server.started:
            await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        server.should_exit = True
        await serving


class Deployment:
    """A prefill server, a decode server, the proxy, and a client of the proxy."""

    def __init__(self, prefill: Behaviour, decode: Behaviour, at_once: bool = True) -> None:
        self.prefill, self.decode, self.at_once = FakeVllmServer(prefill), FakeVllmServer(decode), at_once

    async def __aenter__(self) -> Deployment:
        self._stack = contextlib.AsyncExitStack()
        self._servers: list[uvicorn.Server] = []
        for server in (self.prefill, self.decode):
            server.url = await self._stack.enter_async_context(listening(server.app(), self._servers))
        proxy = PairingProxy([self.prefill.url], [self.decode.url], self.at_once)
        url = await self._stack.enter_async_context(listening(proxy.app(), self._servers))
        transport = httpx.AsyncHTTPTransport()
        self.client = await self._stack.enter_async_context(
            httpx.AsyncClient(base_url=url, transport=transport, timeout=20)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        for (
            server
        ) in self._servers:  # all at once: each looks at its flag, and for open connections, each 0.1 s
            server.should_exit = True
        await self._stack.aclose()

    async def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        return await self.client.post(path, json={"model": "m", "prompt": "hello", "max_tokens": 9, **body})
