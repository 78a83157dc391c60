"""The proxy's HTTP application.

The first request to a prefill server is sent to the decode server only when the prompt is computed: the prefill
server's answer names its engine. Later requests are sent to both servers at once, and the KV of a layer leaves while
later layers compute. The client gets what the decode server generates, although the prefill server's answer, which is
not needed then, may come later.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from disagg.api.errors import CLIENT_GONE
from disagg.core.random_ids import random_id
from disagg.vllm.proxy.pairing import (
    Body,
    decode_body,
    fields_of,
    is_pairable,
    params_at_once,
    prefill_body,
    source_of,
    value_of,
)
from disagg.vllm.proxy.servers import BAD_GATEWAY, AnswerError, BegunAnswer, VllmServers, whole

LATE_S = 10.0
"""Seconds that a prefill server may take to answer after the decode server has begun to generate."""


@dataclass(frozen=True, slots=True)
class _Pair:
    """One client's request, and the two servers that answer it."""

    path: str
    headers: Mapping[str, str]
    body: Body
    prefill: str
    decode: str
    transfer_id: str


class PairingProxy:
    """Sends each request to a prefill server and a decode server, which are selected round-robin."""

    def __init__(self, prefill: Sequence[str], decode: Sequence[str], at_once: bool) -> None:
        """`prefill`, `decode`: base URLs. `at_once`: whether both servers get a request at the same time."""
        self._prefill, self._decode = itertools.cycle(prefill), itertools.cycle(decode)
        self._at_once = at_once
        self._servers: VllmServers
        """Created when the application starts, because it belongs to its event loop."""
        self._sources: dict[str, dict[str, Any]] = {}
        """Parameters of each prefill server's engine, from the server's latest answer; see `source_of`."""
        self._late: set[asyncio.Task[dict[str, Any]]] = set()
        """Requests to prefill servers whose client has an answer of the decode server already."""

    def app(self) -> Starlette:
        """Returns the ASGI application."""
        routes = [
            Route("/v1/completions", self.generate, methods=["POST"]),
            Route("/v1/chat/completions", self.generate, methods=["POST"]),
            Route("/{path:path}", self.forward, methods=["GET", "POST"]),
        ]
        handlers = {AnswerError: _error_reply}
        return Starlette(routes=routes, lifespan=self._lifespan, exception_handlers=handlers)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        self._servers = VllmServers()
        yield
        for computing in list(self._late):
            await _end_unread(computing)
        await self._servers.close()

    # --- requests of clients

    async def generate(self, request: Request) -> Response:
        """Answers a completion or a chat completion."""
        body = fields_of(await request.body())
        if not is_pairable(body):
            return await self.forward(request)
        prefill, decode = next(self._prefill), next(self._decode)
        pair = _Pair(request.url.path, request.headers, body, prefill, decode, random_id())
        return await _reply(request, self._answer(pair))

    async def forward(self, request: Request) -> Response:
        """Passes a request to a decode server alone."""
        decode, content = next(self._decode), await request.body()
        return await _reply(request, self._ask(request, decode, content))

    async def _ask(self, request: Request, server: str, content: bytes) -> BegunAnswer:
        query = f"?{request.url.query}" if request.url.query else ""
        path = request.scope["raw_path"].decode("latin-1") + query  # `url.path` is not quoted any more
        return BegunAnswer(
            server, await self._servers.ask(request.method, server, path, request.headers, content)
        )

    # --- both servers

    async def _answer(self, pair: _Pair) -> BegunAnswer:
        source = self._sources.get(pair.prefill) if self._at_once else None
        if source is None:
            return await self._generated(pair, await self._computed(pair))
        computing = asyncio.create_task(self._computed(pair))
        generating = asyncio.create_task(self._generated(pair, params_at_once(source, pair.transfer_id)))
        begun = asyncio.create_task(_begun(generating))
        try:
            await asyncio.wait({computing, begun}, return_when=asyncio.FIRST_COMPLETED)
            if begun.done():
                answer = generating.result()  # raises its error: no need to wait for the prompt
                if (
                    answer.has_begun
                ):  # the decode server has the KV, so the prefill server's answer may be late
                    self._late.add(computing)
                    computing.add_done_callback(self._ended)
                    asyncio.get_running_loop().call_later(LATE_S, computing.cancel)
                return answer
            params = await computing
            if source_of(params) == source:
                return await generating
            # The prefill server was restarted: the decode server waits for an engine that is gone.
            await _end(generating)
            return await self._generated(pair, params)
        except BaseException:
            await _end(generating)
            raise
        finally:
            begun.cancel()
            if computing not in self._late:
                await _end_unread(computing)

    def _ended(self, computing: asyncio.Task[dict[str, Any]]) -> None:
        self._late.discard(computing)
        if not computing.cancelled():
            computing.exception()  # an error of the prefill server is logged already

    async def _computed(self, pair: _Pair) -> dict[str, Any]:
        """Lets the prefill server compute the prompt; returns the parameters of its answer."""
        content = msgspec.json.encode(prefill_body(pair.body, pair.transfer_id))
        try:
            answer = await self._servers.ask("POST", pair.prefill, pair.path, pair.headers, content)
            text = await whole(pair.prefill, answer)
        except AnswerError as exc:
            if exc.status == BAD_GATEWAY:  # the server's next life is another engine
                self._sources.pop(pair.prefill, None)
            raise
        params = value_of(fields_of(text), "kv_transfer_params")
        if not isinstance(params, dict):
            raise AnswerError.of(
                BAD_GATEWAY,
                f"{pair.prefill} answered without kv_transfer_params: start that server with --kv-transfer-config, "
                "DisaggConnector and the role kv_producer or kv_both",
            )
        self._sources[pair.prefill] = source_of(params)
        return params

    async def _generated(self, pair: _Pair, params: Mapping[str, Any]) -> BegunAnswer:
        content = msgspec.json.encode(decode_body(pair.body, params))
        answer = await self._servers.ask("POST", pair.decode, pair.path, pair.headers, content)
        return BegunAnswer(pair.decode, answer)


async def _reply(request: Request, asking: Coroutine[Any, Any, BegunAnswer]) -> Response:
    answer = await _unless_gone(request, asking)
    if answer is None:
        return Response(status_code=CLIENT_GONE)
    if answer.kind.startswith("text/event-stream"):
        return StreamingResponse(answer.pieces(), answer.status, media_type=answer.kind)
    return Response(await answer.whole(), answer.status, media_type=answer.kind)


async def _begun(generating: asyncio.Task[BegunAnswer]) -> None:
    """Waits until an answer's first piece has come, or its request has failed."""
    await asyncio.wait({generating})
    if not generating.cancelled() and generating.exception() is None:
        await asyncio.wait({generating.result().first})


async def _error_reply(request: Request, error: Exception) -> Response:
    assert isinstance(error, AnswerError)
    return Response(error.content, error.status, media_type="application/json")


async def _unless_gone(request: Request, asking: Coroutine[Any, Any, BegunAnswer]) -> BegunAnswer | None:
    """Awaits `asking`. If the client disconnects first: ends `asking`, so that vLLM stops computing; returns None."""
    task, gone = asyncio.create_task(asking), asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        gone.cancel()
        if not task.done():
            await _end(task)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _end(task: asyncio.Task[BegunAnswer]) -> None:
    """Cancels a request, or closes its answer: vLLM aborts a request whose connection is closed."""
    await _end_unread(task)
    if not task.cancelled() and task.exception() is None:
        task.result().close()


async def _end_unread(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait({task})
