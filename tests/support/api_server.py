"""A real server (uvicorn, sockets) over a fake generator, on an event loop of its own in a thread."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack, asynccontextmanager
from typing import Any, TypeVar
from unittest.mock import patch

import httpx
from conditions import PATIENCE_S
from fake_generator import FakeGenerator
from prometheus_client.parser import text_string_to_metric_families

from disagg.api.app import make_app
from disagg.api.listener import bind
from disagg.api.model import SHORT_CHARACTERS, ServedModel
from disagg.api.parsers.registry import ParserNames
from disagg.api.server import serve
from disagg.api.service import Service
from disagg.api.tracing import Tracing
from disagg.core.config.read import ApiConfig
from disagg.core.grammars import regex_grammar
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer

T = TypeVar("T")
TEMPLATE = (
    "{% for m in messages %}{% if m.content == 'forbidden' %}{{ raise_exception('no such word') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
CONTEXT_TOKENS = 200


class LogLines:
    """A logger that keeps what is said: the server's thread must not write to what pytest captures of a test."""

    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def _say(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    debug = info = warning = exception = _say


class ApiServer:
    """`with ApiServer(...) as server:` serves; `client` speaks to it, `generator` is what it asks."""

    def __init__(
        self,
        *keys: str,
        template: str | None = TEMPLATE,
        with_tokenizer: bool = True,
        send_buffer_bytes: int = 0,
        tracing: Tracing | None = None,
        **settings: Any,
    ) -> None:
        """`send_buffer_bytes`: what the kernel takes from the server for a client that does not read; 0 is a lot."""
        self._tracing = tracing
        self._send_buffer_bytes = send_buffer_bytes
        self._keys = tuple(key.encode() for key in keys)
        self._config = ApiConfig(port=0, **{"max_running": 256, **settings})
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        self._with_tokenizer = with_tokenizer
        chosen = tokenizer if with_tokenizer else None
        parsers = ParserNames(self._config.tool_parser, self._config.reasoning_parser)
        self.model = ServedModel(
            "tiny",
            chosen,
            context_tokens=CONTEXT_TOKENS,
            vocab_tokens=VOCAB_SIZE,
            eos_ids=(EOS_ID,),
            parsers=parsers,
        )
        self.thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="api-server")
        self._up = threading.Event()
        self.log = LogLines()
        self._patches = ExitStack()

    def __enter__(self) -> ApiServer:
        for module in ("edge", "server", "service"):
            self._patches.enter_context(patch(f"disagg.api.{module}.log", self.log))
        self.thread.start()
        assert self._up.wait(PATIENCE_S), "the server did not come up"
        if self._with_tokenizer:  # starts the tokenizer's thread, which is the server's and no test's
            self.run(self.model.encode("x" * (SHORT_CHARACTERS + 1)))
            self.run(self.model.check_grammar(regex_grammar("a"), "regex"))  # and the grammars' threads
            self.run(self.model.make_grammar(lambda: None))
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE_S, trust_env=False)
        return self

    def __exit__(self, *exc: object) -> None:
        self.client.close()
        self.stop()
        self.stop_now()
        self.thread.join(PATIENCE_S)
        self.model.close()
        self._patches.close()
        assert not self.thread.is_alive(), "the server did not stop"

    def stop(self) -> None:
        """As the first signal does."""
        self._on_loop(self._stop.set)

    def stop_now(self) -> None:
        """As the second one does."""
        self._on_loop(self._hurry.set)

    def set(self, **attributes: Any) -> None:
        """Changes the generator."""
        self.run(self._set(attributes))

    def go(self) -> None:
        """Lets held answers go on."""
        self._on_loop(self.generator.go.set)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work` on the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(PATIENCE_S)

    def ask(self, path: str = "/v1/completions", **fields: Any) -> httpx.Response:
        """A request with `model` and a prompt, unless `fields` say otherwise."""
        return self.client.post(path, json=body(path, **fields))

    def value(self, metric: str, **labels: str) -> float:
        """A sample of the router's metrics; 0 where there is none."""
        return self.service.metrics.registry.get_sample_value(metric, labels) or 0.0

    def scraped(self) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
        """What `/metrics` says: each sample by its name and labels."""
        return samples_of(self.client.get("/metrics").text)

    async def _set(self, attributes: dict[str, Any]) -> None:
        for name, value in attributes.items():
            assert hasattr(self.generator, name)
            setattr(self.generator, name, value)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        async with self._generating() as self.generator:
            self.service = Service(self.generator, self.model, self._config)
            app = make_app(self.service, self._keys, self._tracing)
            listener = bind(self._config)
            if self._send_buffer_bytes:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
            await serve(app, self.service, listener, self._stop, self._hurry, self._listening)

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[Any]:
        yield FakeGenerator()

    def _listening(self, url: str) -> None:
        self.url = url
        self._up.set()

    def _on_loop(self, action: Callable[[], Any]) -> None:
        if self.thread.is_alive():
            try:
                self._loop.call_soon_threadsafe(action)
            except RuntimeError:
                assert not self.thread.is_alive() or self._loop.is_closed()


def body(path: str, **fields: Any) -> dict[str, Any]:
    """The fields that each request must have, and `fields`; `...` takes one out."""
    least: dict[str, Any] = {"model": "tiny"}
    if "responses" in path:
        least["input"] = "hi"
    elif "chat" in path or "messages" in path:
        least["messages"] = [{"role": "user", "content": "hi"}]
    else:
        least["prompt"] = "hi"
    if path.endswith("messages"):
        least["max_tokens"] = 9
    merged = {**least, **fields}
    return {name: value for name, value in merged.items() if value is not ...}


def samples_of(metrics: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """Each sample of the text of `/metrics`, by its name and labels."""
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
    }
