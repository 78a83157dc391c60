"""Serves the HTTP API with a router. A server with one process and each worker process of a larger server share this
code."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import structlog
import uvloop

from disagg.api.app import make_app
from disagg.api.keys import require_api_keys
from disagg.api.model import ServedModel
from disagg.api.parsers.registry import ParserNames
from disagg.api.server import serve
from disagg.api.service import Service
from disagg.api.tracing import Tracing
from disagg.api.workers import Siblings
from disagg.commands.local import limit_tokens
from disagg.core.collection import collect_requests_only, imports_frozen
from disagg.core.config.read import ApiConfig, Config
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.router.follow import joined
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from disagg.router.status import watching
from transport.control.thread import TurnPace
from transport.control.zmq import make_control
from transport.hosts import is_loopback
from transport.keys.ring import KeyRing

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ServerParts:
    """The parts of an HTTP server besides its router. The creator closes `model` and `tracing`; `serve_router` closes
    `listener`."""

    config: Config
    model: ServedModel
    keys: tuple[bytes, ...]
    tracing: Tracing | None
    listener: socket.socket
    siblings: Siblings


@dataclass(frozen=True)
class ModelFacts:
    """What an HTTP server and its router know of the model.

    A worker gets the facts of its parent, pickled, and imports neither torch nor transformers' models: they take four
    seconds of CPU time and 300 MB in each process.
    """

    name: str
    tokenizer: Any
    """None for a model without a tokenizer."""
    context_tokens: int
    vocab_tokens: int
    eos_ids: tuple[int, ...]


@dataclass(frozen=True)
class Stop:
    """Events that stop a server: `drain` lets running requests finish, `now` aborts them."""

    drain: asyncio.Event = field(default_factory=asyncio.Event)
    now: asyncio.Event = field(default_factory=asyncio.Event)

    def request(self) -> None:
        """Sets `drain` in the first call and `now` in the second."""
        (self.now if self.drain.is_set() else self.drain).set()


def api_keys(config: ApiConfig) -> tuple[bytes, ...]:
    """Returns the API keys, checked by `require_api_keys`. Logs a warning if other machines can use the API without a
    key."""
    keys = require_api_keys(config, os.environ)
    if not keys and not is_loopback(config.host):
        log.warning(
            "no_api_key", host=config.host, means="every client that reaches this address may use the model"
        )
    return keys


def run_loop(main: Coroutine[Any, Any, None]) -> None:
    """Runs `main` on a new uvloop event loop until it returns."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main)


def model_facts(config: Config) -> ModelFacts:
    """Returns name, tokenizer and limits of the configured model. Raises ConfigError or UnsupportedModelError."""
    with imports_frozen():
        import torch

        from disagg.model.load.source import make_source
        from disagg.model.load.tokenizer import has_tokenizer, load_tokenizer

        source = make_source(config)
    name = config.api.model_name or source.label
    tokenizer = load_tokenizer(source) if has_tokenizer(source) else None
    if tokenizer is None:
        log.warning(
            "no_tokenizer",
            folder=source.name,
            means="prompts must be token ids, and answers are token ids; text is refused",
            remedy="copy the model's tokenizer files (tokenizer.json) to the folder",
        )
    spec = source.spec(torch.float32)
    return ModelFacts(name, tokenizer, limit_tokens(config, source), spec.vocab_size, tuple(spec.eos_ids))


def served_model(config: Config, facts: ModelFacts) -> ServedModel:
    """Returns the model with its threads and parsers of chat answers. The caller closes it."""
    model = ServedModel(
        facts.name,
        facts.tokenizer,
        context_tokens=facts.context_tokens,
        vocab_tokens=facts.vocab_tokens,
        eos_ids=facts.eos_ids,
        parsers=ParserNames(config.api.tool_parser, config.api.reasoning_parser),
    )
    log.info("chat_parsers", tools=model.parsers.tools, reasoning=model.parsers.reasoning)
    return model


def model_fingerprint(config: Config) -> str:
    """Returns the digest of the configured model's weights and configuration. May read all weights."""
    from disagg.model.load.source import make_source

    return make_source(config).fingerprint


@asynccontextmanager
async def joined_router(
    config: Config, keys: KeyRing, directory: str, fingerprint_of: Callable[[], str]
) -> AsyncIterator[Router]:
    """Yields a router with its own control channel. The router uses the groups that `directory` announces, if they
    have the model with the fingerprint that `fingerprint_of` returns, on another thread, and our protocol version."""
    fingerprint = await asyncio.to_thread(fingerprint_of)

    def usable(group: GroupInfo) -> bool:
        ours = group.fingerprint == fingerprint and group.protocol_version == PROTOCOL_VERSION
        if not ours:
            log.error("group_not_usable", group=group.name, why="another model or release than this router's")
        return ours

    dispatcher = ResponseDispatcher(
        make_control(config.control, keys, config.control.router_port, TurnPace()), asyncio.get_running_loop()
    )
    dispatcher.start()
    try:
        router = Router(dispatcher, config=config.router)
        async with joined(dispatcher, router, directory, usable):
            yield router
    finally:
        dispatcher.close()


async def serve_router(
    made: AbstractAsyncContextManager[Router],
    parts: ServerParts,
    stop: Stop,
    on_listening: Callable[[str], None],
) -> None:
    """Serves the HTTP API with the router that `made` yields, until `stop`. Calls `on_listening` with the URL."""
    config, siblings = parts.config, parts.siblings
    async with made as router, watching(router.statuses, config.metrics.interval_s):
        service = Service(router, parts.model, config.api, siblings.share)
        router.on_groups_changed(service.follow_groups)
        collect_requests_only()
        app = make_app(service, parts.keys, parts.tracing, siblings)
        async with siblings.listening(service.report):
            await serve(app, service, parts.listener, stop.drain, stop.now, on_listening)
