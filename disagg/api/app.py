"""The HTTP routes. Starlette only dispatches requests; msgspec decodes and encodes the bodies."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from functools import partial
from itertools import chain
from typing import Any

import msgspec
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from disagg import __version__
from disagg.api.anthropic.request import count_tokens, parse_messages
from disagg.api.anthropic.writer import MessagesWriter
from disagg.api.body import decode_object, to_struct
from disagg.api.chat_request import conversation, parse_chat, plain_tools, template_options
from disagg.api.chat_writer import ChatWriter
from disagg.api.edge import Edge
from disagg.api.errors import ApiError, api_error, bad
from disagg.api.exchange import exchange_of, read_body
from disagg.api.fields import DetokenizeBody, ProfileBody, TokenizeBody
from disagg.api.generation_request import GenerationRequest, check_model, parse_completion
from disagg.api.group_metrics import GroupCollector
from disagg.api.metrics import exposition
from disagg.api.model import ServedModel
from disagg.api.openai_responses.request import parse_responses
from disagg.api.openai_responses.writer import ResponsesWriter
from disagg.api.page import page_response
from disagg.api.responses import EventStream, error_response, whole_reply
from disagg.api.service import Service
from disagg.api.tracing import Tracing
from disagg.api.workers import Share, Siblings, WorkerReport, merged_groups, merged_metrics, merged_status
from disagg.api.writers import AnswerWriter, CompletionWriter
from disagg.core.errors import DisaggError
from disagg.core.profile.types import TraceSummary

MakeWriter = Callable[[ServedModel, str], AnswerWriter]
"""Function that returns the writer of a request; the text is the request's id."""


def make_app(
    service: Service,
    keys: tuple[bytes, ...],
    tracing: Tracing | None = None,
    siblings: Siblings | None = None,
) -> ASGIApp:
    """Returns the API as an ASGI application. `siblings`: the server's other workers. The caller closes `tracing`."""
    routes = _routes(service, siblings or Siblings(Share()))
    app = Starlette(
        routes=[Route(path, handler, methods=[method]) for path, method, handler in routes],
        exception_handlers={
            ApiError: _on_api_error,
            DisaggError: _on_error,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    return Edge(app, service.config, keys, service.metrics, tracing, service.check_capacity)


def _routes(service: Service, siblings: Siblings) -> list[tuple[str, str, Any]]:
    routes = _Routes(service, siblings)
    return [
        ("/", "GET", routes.page),
        ("/v1/completions", "POST", routes.completions),
        ("/v1/chat/completions", "POST", routes.chat),
        ("/v1/responses", "POST", routes.responses),
        ("/v1/messages", "POST", routes.messages),
        ("/v1/messages/count_tokens", "POST", routes.count_tokens),
        ("/v1/models", "GET", routes.models),
        ("/version", "GET", routes.version),
        ("/v1/models/{name:path}", "GET", routes.model),
        ("/tokenize", "POST", routes.tokenize),
        ("/detokenize", "POST", routes.detokenize),
        ("/health", "GET", routes.health),
        ("/ready", "GET", routes.ready),
        ("/metrics", "GET", routes.metrics),
        ("/status", "GET", routes.status),
        ("/profile", "POST", routes.profile),
    ]


class _Routes:
    """Handlers of the routes."""

    def __init__(self, service: Service, siblings: Siblings) -> None:
        self._service, self._model, self._siblings = service, service.model, siblings

    async def page(self, request: Request) -> Response:
        """Returns the live page."""
        return page_response()

    async def completions(self, request: Request) -> Response:
        """Completes a prompt."""
        generation = await parse_completion(await self._body(request), self._model, self._service.config)
        return await self._answer(request, generation, partial(CompletionWriter, generation))

    async def chat(self, request: Request) -> Response:
        """Returns the next message of a conversation."""
        generation = await parse_chat(await self._body(request), self._model, self._service.config)
        return await self._answer(request, generation, partial(ChatWriter, generation))

    async def responses(self, request: Request) -> Response:
        """Returns the next items of a conversation."""
        parsed = await parse_responses(await self._body(request), self._model, self._service.config)
        return await self._answer(request, parsed.generation, partial(ResponsesWriter, parsed))

    async def messages(self, request: Request) -> Response:
        """Returns the next message of a conversation, in Anthropic's format."""
        parsed = await parse_messages(await self._body(request), self._model, self._service.config)
        return await self._answer(request, parsed.generation, partial(MessagesWriter, parsed))

    async def count_tokens(self, request: Request) -> Response:
        """Returns the number of tokens of a conversation in Anthropic's format."""
        return _json({"input_tokens": await count_tokens(await self._body(request), self._model)})

    async def models(self, request: Request) -> Response:
        """Returns the list of models, which contains only the served model."""
        return _json({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """Returns a model by name."""
        check_model(request.path_params["name"], self._model)
        return _json(self._card())

    async def tokenize(self, request: Request) -> Response:
        """Returns the tokens of a text, or of a conversation in the model's chat template."""
        body = to_struct(decode_object(await self._body(request)), TokenizeBody, {})
        check_model(body.model, self._model)
        if (body.prompt is None) == (body.messages is None):
            raise bad("prompt", "give either prompt or messages")
        if body.messages is not None:
            options = template_options(body, plain_tools(body.tools))
            messages = conversation(body.messages)
            tokens = (await self._model.render(messages, options, body.add_generation_prompt)).tokens
        else:
            tokens = await self._model.encode(body.prompt or "", body.add_special_tokens)
        limit = self._model.context_tokens
        return _json({"count": len(tokens), "max_model_len": limit, "tokens": tokens})

    async def detokenize(self, request: Request) -> Response:
        """Returns the text of tokens, including special tokens."""
        body = to_struct(decode_object(await self._body(request)), DetokenizeBody, {})
        check_model(body.model, self._model)
        return _json({"prompt": self._model.spell(self._model.check_tokens(body.tokens, "tokens"))})

    async def version(self, request: Request) -> Response:
        """Returns the version of the server."""
        return _json({"version": __version__})

    async def health(self, request: Request) -> Response:
        """Returns 200 while the process responds."""
        return _json({"status": "alive"})

    async def ready(self, request: Request) -> Response:
        """Returns 200 if requests are served, else 503 with the reason."""
        why = self._service.why_not_ready()
        return _json({"status": why or "ready"}, 503 if why else 200)

    async def metrics(self, request: Request) -> Response:
        """Returns the metrics of all workers in Prometheus' text format."""
        reports = await self._reports()
        families = merged_metrics(reports, labelled=self._siblings.share.workers > 1)
        groups = GroupCollector(lambda: merged_groups(reports)).collect()
        return Response(exposition(chain(families, groups)), media_type=CONTENT_TYPE_LATEST)

    async def status(self, request: Request) -> Response:
        """Returns the status of all workers and their groups, with the latest answers."""
        return _json(merged_status(await self._reports()))

    async def profile(self, request: Request) -> Response:
        """Records some steps of a rank. Streams a JSON object per line: `steps` so far, then `summary` or `error`."""
        body = to_struct(decode_object(await self._body(request)), ProfileBody, {})
        replies = self._service.profile(body.request())
        first = await anext(replies)  # a refusal gets an error status
        return StreamingResponse(_profile_lines(first, replies), media_type="application/x-ndjson")

    async def _reports(self) -> list[WorkerReport]:
        """Returns the reports of all workers, this worker first."""
        others = await self._siblings.reports()
        return [self._service.report(), *others]

    async def _answer(
        self, request: Request, generation: GenerationRequest, make_writer: MakeWriter
    ) -> Response:
        exchange = exchange_of(request)
        writer = make_writer(self._model, exchange.request_id)
        start = partial(self._service.start, generation, exchange)
        if generation.stream:
            return EventStream(start, writer, exchange)
        return await whole_reply(start, writer, exchange, request.receive)

    async def _body(self, request: Request) -> bytes:
        return await read_body(request.scope, request.receive, self._service.config, exchange_of(request))

    def _card(self) -> dict[str, Any]:
        model = self._model
        return {
            "id": model.name,
            "object": "model",
            "created": model.created_s,
            "owned_by": "disagg",
            "max_model_len": model.context_tokens,
        }


async def _profile_lines(
    first: int | TraceSummary, replies: AsyncGenerator[int | TraceSummary, None]
) -> AsyncGenerator[bytes, None]:
    try:
        yield _profile_line(first)
        async for reply in replies:
            yield _profile_line(reply)
    except DisaggError as exc:
        yield api_error(exc).body() + b"\n"
    finally:
        await replies.aclose()


def _profile_line(reply: int | TraceSummary) -> bytes:
    line = {"steps": reply} if isinstance(reply, int) else {"summary": reply}
    return msgspec.json.encode(line) + b"\n"


def _json(value: object, status: int = 200) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")


async def _on_api_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, ApiError), "registered for that class"
    return _refused(request, exc)


async def _on_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, DisaggError), "registered for that class"
    return _refused(request, api_error(exc))


async def _on_http_error(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, HTTPException), "registered for that class"
    route = f"{request.method} {request.url.path}"
    message = f"there is no route {route}" if exc.status_code in (404, 405) else str(exc.detail)
    code = {404: "not_found", 405: "method_not_allowed"}.get(exc.status_code)
    return _refused(request, ApiError(exc.status_code, message, code=code, headers=dict(exc.headers or {})))


async def _on_bug(request: Request, exc: Exception) -> Response:
    error = ApiError(500, "internal error; the server's log has its details", code="internal")
    return _refused(request, error)


def _refused(request: Request, error: ApiError) -> Response:
    """Returns the response of an error, and records the reason for the log."""
    exchange = exchange_of(request)
    exchange.reason = error.message
    return error_response(error, request.url.path, exchange.request_id)
