"""Every refusal: its status and field; the engine never receives the request."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import ApiServer, body
from conditions import PATIENCE_S

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LIMITS = {
    "max_body_bytes": 4096,
    "max_header_bytes": 2048,
    "max_line_bytes": 512,
    "max_prompts": 3,
    "max_n": 4,
    "max_stop": 2,
    "max_running": 4,
    "max_queued": 4,
}


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(**LIMITS) as running:
        yield running
        assert running.generator.calls == [], "what is refused does not reach the engine"


USER = [{"role": "user", "content": "hi"}]
TOOL = [{"type": "function", "function": {"name": "f"}}]
CALL = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{"}}


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


FIELDS: list[tuple[str, dict[str, Any], str, str | None]] = [
    # what is missing or of a wrong type
    (COMPLETIONS, {"model": ...}, "model", None),
    (COMPLETIONS, {"prompt": ...}, "prompt", None),
    (CHAT, {"messages": ...}, "messages", None),
    (COMPLETIONS, {"prompt": 3}, "prompt", None),
    (COMPLETIONS, {"prompt": ["a", 3]}, "prompt", None),
    (COMPLETIONS, {"prompt": [[1], "a"]}, "prompt", None),
    (COMPLETIONS, {"prompt": [True]}, "prompt", None),
    (COMPLETIONS, {"prompt": []}, "prompt", None),
    (COMPLETIONS, {"prompt": ""}, "prompt", None),
    (COMPLETIONS, {"prompt": ["a", ""]}, "prompt", None),
    (COMPLETIONS, {"prompt": [5, 259]}, "prompt", None),
    (COMPLETIONS, {"prompt": [5, 1 << 40]}, "prompt", None),
    (COMPLETIONS, {"prompt": [5, True]}, "prompt", None),
    (COMPLETIONS, {"prompt": [5, "a"]}, "prompt", None),
    (COMPLETIONS, {"prompt": [[5], [-1]]}, "prompt[1]", None),
    (COMPLETIONS, {"max_tokens": "9"}, "max_tokens", None),
    (COMPLETIONS, {"temperature": "hot"}, "temperature", None),
    (COMPLETIONS, {"stop": ["a", 1]}, "stop[1]", None),
    (COMPLETIONS, {"cache_salt": "x" * 300}, "cache_salt", None),
    (COMPLETIONS, {"prompt_cache_key": "x" * 300}, "prompt_cache_key", None),
    (COMPLETIONS, {"prompt_cache_key": 7}, "prompt_cache_key", None),
    (COMPLETIONS, {"stop_token_ids": ["1"]}, "stop_token_ids[0]", None),
    (COMPLETIONS, {"stream": 1}, "stream", None),
    (COMPLETIONS, {"logprobs": True}, "logprobs", None),
    (
        COMPLETIONS,
        {"stream": True, "stream_options": {"include_usage": 1}},
        "stream_options.include_usage",
        None,
    ),
    (CHAT, {"logprobs": 3}, "logprobs", None),
    (CHAT, {"messages": "hi"}, "messages", None),
    (CHAT, {"messages": ["hi"]}, "messages[0]", None),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", None),
    (CHAT, {"messages": [*USER, {"role": "user"}]}, "messages[1].content", None),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", None),
    # what is out of range
    (COMPLETIONS, {"max_tokens": 0}, "max_tokens", None),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", None),
    (CHAT, {"max_completion_tokens": 0}, "max_tokens", None),
    (COMPLETIONS, {"min_tokens": 99}, "min_tokens", None),
    (COMPLETIONS, {"temperature": -1}, "temperature", None),
    (COMPLETIONS, {"top_p": 0}, "top_p", None),
    (COMPLETIONS, {"top_k": -2}, "top_k", None),
    (COMPLETIONS, {"min_p": 1.5}, "min_p", None),
    (COMPLETIONS, {"n": 0}, "n", None),
    (COMPLETIONS, {"n": 5}, "n", None),
    (COMPLETIONS, {"n": 4, "prompt": ["a", "b", "c"]}, "n", None),
    (COMPLETIONS, {"seed": 1 << 63}, "seed", None),
    (COMPLETIONS, {"seed": 1 << 80}, "seed", None),
    (COMPLETIONS, {"presence_penalty": 3}, "presence_penalty", None),
    (COMPLETIONS, {"frequency_penalty": -3}, "frequency_penalty", None),
    (COMPLETIONS, {"repetition_penalty": 0}, "repetition_penalty", None),
    (COMPLETIONS, {"logprobs": 21}, "logprobs", None),
    (CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", None),
    (CHAT, {"top_logprobs": 2}, "top_logprobs", None),
    (COMPLETIONS, {"prompt_logprobs": -1}, "prompt_logprobs", None),
    (CHAT, {"priority": 1 << 31}, "priority", None),
    (COMPLETIONS, {"priority": "high"}, "priority", None),
    (CHAT, {"prompt_logprobs": 21}, "prompt_logprobs", None),
    (COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", None),
    (COMPLETIONS, {"prompt_logprobs": 1, "use_beam_search": True}, "prompt_logprobs", None),
    (COMPLETIONS, {"logit_bias": {"x": 1}}, "logit_bias", None),
    (COMPLETIONS, {"logit_bias": {"-1": 1}}, "logit_bias", None),
    (COMPLETIONS, {"logit_bias": {"259": 1}}, "logit_bias", None),
    (COMPLETIONS, {"logit_bias": {"1": 101}}, "logit_bias", None),
    (COMPLETIONS, {"stop_token_ids": [259]}, "stop_token_ids", None),
    (COMPLETIONS, {"stop": ["a", ""]}, "stop", None),
    (COMPLETIONS, {"stop": ["a", "b", "c"]}, "stop", None),
    (COMPLETIONS, {"stop": "x" * 257}, "stop", None),
    (COMPLETIONS, {"stop_token_ids": [1, 2, 3]}, "stop_token_ids", None),
    (COMPLETIONS, {"prompt": ["a"] * 4}, "prompt", None),
    (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options", None),
    # several answers, and beams
    (COMPLETIONS, {"best_of": 1, "n": 2}, "best_of", None),
    (COMPLETIONS, {"best_of": 2, "stream": True}, "best_of", None),
    (COMPLETIONS, {"use_beam_search": True, "stream": True}, "use_beam_search", None),
    (COMPLETIONS, {"use_beam_search": True, "best_of": 2, "max_tokens": 1}, "use_beam_search", None),
    (COMPLETIONS, {"use_beam_search": True, "temperature": 0.5}, "temperature", None),
    (CHAT, {"use_beam_search": True, "logprobs": True}, "logprobs", None),
    (CHAT, {"length_penalty": 2.0}, "length_penalty", None),
    (CHAT, {"early_stopping": "never"}, "early_stopping", None),
    (CHAT, {"use_beam_search": True, "length_penalty": 11.0}, "length_penalty", None),
    # too long
    (COMPLETIONS, {"prompt": "x" * 190}, "prompt", "context_length_exceeded"),
    (COMPLETIONS, {"max_tokens": 199}, "prompt", "context_length_exceeded"),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "context_length_exceeded"),
    # what is not supported
    (CHAT, {"echo": True}, "echo", "unsupported_field"),
    (COMPLETIONS, {"suffix": "x"}, "suffix", "unsupported_field"),
    (COMPLETIONS, {"tools": [{"type": "function"}]}, "tools", "unsupported_field"),
    (CHAT, {"chat_template_kwargs": {"chat_template": "{{ x }}"}}, "chat_template_kwargs", None),
    (CHAT, {"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", None),
    (CHAT, {"functions": [{"name": "f"}]}, "functions", "unsupported_field"),
    # structured outputs
    (CHAT, {"response_format": {"type": "grammar"}}, "response_format.type", None),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", None),
    (CHAT, {"response_format": schema_format({"type": "objec"})}, "response_format", "invalid_grammar"),
    (CHAT, {"response_format": schema_format({"$ref": "http://x/y"})}, "response_format", "invalid_grammar"),
    (
        CHAT,
        {"response_format": schema_format({"oneOf": [{}, {"pattern": "a"}]})},
        "response_format",
        "invalid_grammar",
    ),
    (COMPLETIONS, {"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "invalid_grammar"),
    (
        COMPLETIONS,
        {"structured_outputs": {"grammar": "start: b"}},
        "structured_outputs.grammar",
        "invalid_grammar",
    ),
    (COMPLETIONS, {"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar", None),
    (COMPLETIONS, {"structured_outputs": {"json": "{"}}, "structured_outputs.json", None),
    (COMPLETIONS, {"structured_outputs": {"json": "[]"}}, "structured_outputs.json", None),
    (COMPLETIONS, {"structured_outputs": {"choice": []}}, "structured_outputs.choice", None),
    (COMPLETIONS, {"structured_outputs": {"choice": ["a", ""]}}, "structured_outputs.choice", None),
    (COMPLETIONS, {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", None),
    (COMPLETIONS, {"structured_outputs": {"regexp": "a"}}, "structured_outputs", None),
    (COMPLETIONS, {"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice", None),
    (COMPLETIONS, {"guided_regex": "a", "structured_outputs": {"regex": "a"}}, "guided_regex", None),
    (COMPLETIONS, {"guided_regex": "(a"}, "guided_regex", "invalid_grammar"),
    (COMPLETIONS, {"guided_regex": "a", "ignore_eos": True}, "ignore_eos", None),
    (COMPLETIONS, {"guided_regex": "a", "min_tokens": 1}, "min_tokens", None),
    (COMPLETIONS, {"guided_regex": "a", "use_beam_search": True}, "use_beam_search", None),
    (CHAT, {"tools": TOOL, "tool_choice": "required", "use_beam_search": True}, "use_beam_search", None),
    (CHAT, {"tools": TOOL, "tool_choice": "required", "guided_regex": "a"}, "guided_regex", None),
    (CHAT, {"audio": {"voice": "x"}}, "audio", "unsupported_field"),
    (CHAT, {"modalities": ["text", "audio"]}, "modalities", "unsupported_field"),
    (CHAT, {"chat_template": "{{ messages }}"}, "chat_template", "unknown_field"),
    (CHAT, {"prompt": "x"}, "prompt", "unknown_field"),
    (COMPLETIONS, {"max_token": 3}, "max_token", "unknown_field"),
    (COMPLETIONS, {"stream": True, "stream_options": {"x": 1}}, "stream_options", None),
    (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", None),
    # tools
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", None),
    (CHAT, {"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0].type", None),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", None),
    (CHAT, {"tools": TOOL * 2}, "tools", None),
    (CHAT, {"tools": TOOL}, "tools", "no_tool_parser"),
    (CHAT, {"tool_choice": "required"}, "tool_choice", None),
    (CHAT, {"tool_choice": "always"}, "tool_choice", None),
    (
        CHAT,
        {"tools": TOOL, "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice",
        None,
    ),
    (CHAT, {"messages": [{**USER[0], "tool_calls": [1]}]}, "messages[0].tool_calls[0]", None),
    (CHAT, {"messages": [{**USER[0], "tool_calls": [CALL]}]}, "messages[0].tool_calls", None),
    (CHAT, {"messages": [{**USER[0], "tool_call_id": "x"}]}, "messages[0].tool_call_id", None),
    (CHAT, {"messages": [{**USER[0], "reasoning": "x"}]}, "messages[0].reasoning", None),
    (
        CHAT,
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}]},
        "messages[0].tool_calls[0].function.arguments",
        None,
    ),
    (CHAT, {"messages": [{"role": "user", "content": "x", "y": 1}]}, "messages[0].y", "unknown_field"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
        "messages[0].content[0].type",
        None,
    ),
    (CHAT, {"messages": []}, "messages", None),
    (CHAT, {"messages": [{"role": "user", "content": "forbidden"}]}, "messages", None),
    ("/tokenize", {"prompt": ...}, "prompt", None),
    ("/tokenize", {"messages": USER}, "prompt", None),
    ("/detokenize", {"prompt": ..., "tokens": [259]}, "tokens", None),
    ("/detokenize", {"prompt": ..., "tokens": "x"}, "tokens", None),
]


@pytest.mark.parametrize(("path", "fields", "param", "code"), FIELDS)
def test_a_field_is_refused_by_name(
    server: ApiServer, path: str, fields: dict[str, Any], param: str, code: str | None
) -> None:
    reply = server.ask(path, **fields)
    assert reply.status_code == 400, reply.text
    assert reply.json().keys() == {"error"}
    error = reply.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert (error["param"], error["code"], error["type"]) == (param, code, "invalid_request_error")
    assert param.split("[")[0].split(".")[-1] in error["message"] or code == "context_length_exceeded"


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"[" * 3000, b'{"prompt": "\\ud800"}'])
def test_a_body_that_is_no_object(server: ApiServer, raw: bytes) -> None:
    reply = server.client.post(COMPLETIONS, content=raw)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, None), reply.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
def test_another_model(server: ApiServer, path: str) -> None:
    fields = {"prompt": ..., "tokens": [1]} if path == "/detokenize" else {}
    error = server.ask(path, model="gpt-9", **fields)
    assert (error.status_code, error.json()["error"]["code"]) == (404, "model_not_found")
    assert server.client.get("/v1/models/gpt-9").status_code == 404


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", "/nope", 404), ("GET", COMPLETIONS, 405), ("PUT", "/health", 405)]
)
def test_routes_that_are_not(server: ApiServer, method: str, path: str, status: int) -> None:
    reply = server.client.request(method, path)
    assert reply.status_code == status
    assert reply.json()["error"]["message"] == f"there is no route {method} {path}"


@pytest.mark.parametrize("given", ["0", "-1", "nan", "soon", ""])
def test_a_time_limit_that_is_none(server: ApiServer, given: str) -> None:
    reply = server.client.post(COMPLETIONS, json=body(COMPLETIONS), headers={"x-request-timeout-s": given})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-request-timeout-s")


@pytest.mark.parametrize("given", ["", "two words", "x" * 129])
def test_a_session_name_that_is_none(server: ApiServer, given: str) -> None:
    reply = server.client.post(COMPLETIONS, json=body(COMPLETIONS), headers={"x-session-id": given})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "x-session-id")


def test_a_body_too_large(server: ApiServer) -> None:
    reply = server.ask(prompt="x" * 5000)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "body_too_large")
    chunks = server.client.post(COMPLETIONS, content=iter([b"x" * 3000] * 3))
    assert chunks.status_code == 413, "also when no length was said before"


def test_a_body_that_does_not_come(server: ApiServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(b"POST /tokenize HTTP/1.1\r\ncontent-length: 9\r\nx-request-timeout-s: 0.1\r\n\r\n{")
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 408 ")


def test_heads_too_large(server: ApiServer) -> None:
    line = server.client.get("/health", headers={"x": "y" * 600})
    assert (line.status_code, line.json()["error"]["code"]) == (431, "headers_too_large")
    assert "512 bytes" in line.json()["error"]["message"]
    assert server.client.get("/health?" + "y" * 600).status_code == 431
    many = server.client.get("/health", headers={f"x{i}": "y" * 200 for i in range(10)})
    assert many.status_code == 431
    assert "2048 bytes" in many.json()["error"]["message"]


@pytest.mark.parametrize("head", [b"x: " + b"y" * 3000, b"x: y\r\n" * 600])
def test_a_head_that_does_not_end(server: ApiServer, head: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n" + head)
        answer = b"".join(iter(lambda: raw.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b"headers_too_large" in answer


def test_many_small_requests_on_one_connection_are_no_large_head(server: ApiServer) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as raw:
        for _ in range(40):
            raw.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\npadding: " + b"y" * 100 + b"\r\n\r\n")
            answer = b""
            while not answer.endswith(b'{"status":"alive"}'):
                answer += raw.recv(4096)
            assert answer.startswith(b"HTTP/1.1 200 OK")


def test_without_a_chat_template() -> None:
    with ApiServer(template=None) as server:
        reply = server.ask(CHAT)
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")
        assert "has no chat template" in reply.json()["error"]["message"]


def test_keys() -> None:
    with ApiServer("one", "two") as server:

        def status(path: str, *header: str) -> int:
            headers = {"authorization": header[0]} if header else {}
            return server.client.get(path, headers=headers).status_code

        assert status("/v1/models", "Bearer one") == status("/v1/models", "bearer two") == 200
        for wrong in ("Bearer onet", "Bearer on", "Basic one", "one", "Bearer", "Bearer \u00e9"):
            assert status("/v1/models", wrong.encode("latin-1")) == 401, wrong  # type: ignore[arg-type]
        assert status("/v1/models") == status("/nope") == status("/tokenize") == 401
        assert {status(path) for path in ("/health", "/ready", "/metrics")} == {200}
        reply = server.ask()
        assert reply.headers["www-authenticate"] == "Bearer"
        assert reply.json()["error"]["code"] == "invalid_api_key"
        assert reply.headers["x-request-id"]
        assert "one" not in reply.text
