"""Anthropic's `/v1/messages`: blocks, events, conversations, token counts, keys, refusals, faults."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from anthropic_types import (
    Failure,
    Message,
    Text,
    Thinking,
    ToolUse,
    accumulated,
    events_of,
    failure_of,
    message_of,
)
from api_server import ApiServer, body
from conditions import until
from test_api_life import filled
from test_api_tools import ANSWER, CALL, TEMPLATE

from disagg.core.errors import BusyError, PeerLostError, RequestError, RequestTimeoutError
from disagg.model.load.tiny import EOS_ID

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
TOOLS = [
    {"name": "now", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
    {"type": "custom", "name": "then", "input_schema": {"type": "object"}, "description": "d"},
]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(template=TEMPLATE, max_body_bytes=1 << 16) as running:
        yield running


def created(server: ApiServer, answer: str | list[int], **fields: Any) -> Message:
    """A whole message; a stream of the same request must give the same message."""
    server.set(answer=answer.encode() if isinstance(answer, str) else answer, error=None)
    fields = {"tools": TOOLS, "max_tokens": 150, **fields}
    reply = server.ask(MESSAGES, **fields)
    assert reply.status_code == 200, reply.text
    message = message_of(reply.content)
    streamed = accumulated(events_of(server.ask(MESSAGES, stream=True, **fields).content))
    assert alike(streamed) == alike(message)
    return message


def alike(message: Message) -> Any:
    """A message without ids."""
    blocks = [(one.name, one.input) if isinstance(one, ToolUse) else one for one in message.content]
    return (blocks, message.stop_reason, message.stop_sequence, message.usage, message.model)


def prompt_of(server: ApiServer, **fields: Any) -> str:
    created(server, "x", **{"tools": [], "max_tokens": 9, **fields})
    return bytes(server.generator.calls[-1][1]).decode()


def test_a_message(server: ApiServer) -> None:
    message = created(server, ANSWER)
    thinking, text, *calls = message.content
    assert thinking == Thinking(thinking="hm", signature="unsigned")
    assert text == Text(text="Let me see.")
    assert [(one.name, one.input) for one in calls if isinstance(one, ToolUse)] == [
        ("now", {"z": "a"}),
        ("now", {"z": "b"}),
    ]
    assert (message.stop_reason, message.stop_sequence, message.model) == ("tool_use", None, "tiny")
    assert message.id.startswith("msg_")


def test_deltas_arrive_as_text_is_generated(server: ApiServer) -> None:
    server.set(answer=b"<think>hm</think>abc", error=None)
    reply = server.ask(MESSAGES, max_tokens=99, stream=True)
    assert reply.headers["content-type"].startswith("text/event-stream")
    names = [line.removeprefix("event: ") for line in reply.text.split("\n") if line.startswith("event: ")]
    block = ["content_block_start", *["content_block_delta"] * 3, "content_block_stop"]
    assert names == ["message_start", *block, *block, "message_delta", "message_stop"]


def test_usage(server: ApiServer) -> None:
    server.set(cached_tokens=3)
    usage = created(server, "<think>hm</think>ok", tools=[]).usage
    server.set(cached_tokens=None)
    assert (usage.input_tokens, usage.cache_read_input_tokens) == (len("<user>hi") - 3, 3)
    assert usage.output_tokens == len("<think>hm</think>ok")
    assert usage.output_tokens_details.thinking_tokens == len("<think>hm")


def test_the_reasons_of_a_stop(server: ApiServer) -> None:
    message = created(server, "abcENDx", stop_sequences=["zz", "END"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "END")
    assert message.content == [Text(text="abc")]
    message = created(server, ANSWER, max_tokens=25)
    assert (message.stop_reason, message.content[-1]) == ("max_tokens", Text(text="Let me s"))
    message = created(server, [EOS_ID])
    assert (message.stop_reason, message.content) == ("end_turn", [Text(text="")])


def test_calls_that_are_required(server: ApiServer) -> None:
    message = created(server, '{"z": 3}', tool_choice={"type": "tool", "name": "then"})
    assert server.generator.calls[-1][2].grammar
    [call] = message.content
    assert isinstance(call, ToolUse)
    assert (call.name, call.input, message.stop_reason) == ("then", {"z": 3}, "tool_use")
    created(server, "[]", tool_choice={"type": "any"})
    assert server.generator.calls[-1][2].grammar
    message = created(server, CALL % "a", tool_choice={"type": "none"})
    assert message.content == [Text(text=CALL % "a")]
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(created(server, ANSWER, tool_choice=choice).content) == 3


def test_a_truncated_required_call_is_text(server: ApiServer) -> None:
    server.set(answer=b'{"z": 3}', error=None)
    reply = server.ask(MESSAGES, tools=TOOLS, tool_choice={"type": "tool", "name": "then"}, max_tokens=5)
    message = message_of(reply.content)
    assert (message.content, message.stop_reason) == ([Text(text='{"z":')], "max_tokens")


def test_the_text_of_arguments_is_unchanged(server: ApiServer) -> None:
    server.set(answer=rb' {"z": 1e999, "y": "\ud800"}', error=None)
    reply = server.ask(MESSAGES, tools=TOOLS, tool_choice={"type": "tool", "name": "then"}, max_tokens=99)
    assert rb'"input": {"z": 1e999, "y": "\ud800"}' in reply.content


def test_thinking(server: ApiServer) -> None:
    assert prompt_of(server, thinking={"type": "disabled"}) == "<user>hi-"
    assert prompt_of(server, thinking={"type": "enabled", "budget_tokens": 1024}) == "<user>hi"
    assert prompt_of(server, output_config={"effort": "low"}) == "<user>hi~low"
    message = created(server, ANSWER, thinking={"type": "adaptive", "display": "omitted"})
    assert message.content[:2] == [Thinking(thinking="", signature="unsigned"), Text(text="Let me see.")]


def test_a_schema_becomes_a_grammar(server: ApiServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    created(server, "{}", tools=[], output_config={"format": {"type": "json_schema", "schema": schema}})
    assert server.generator.calls[-1][2].grammar


def test_fields_reach_the_engine(server: ApiServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 4, "metadata": {"user_id": "u"}}
    fields |= {"ignore_eos": True, "min_tokens": 2}
    created(server, "x", cache_salt="salt", service_tier="auto", **fields)
    sampling = server.generator.calls[-1][2]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 4)
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)
    assert server.generator.salts[-1] == "salt"


def test_a_conversation_reaches_the_template(server: ApiServer) -> None:
    server.set(answer=ANSWER.encode(), error=None)
    first = server.ask(MESSAGES, tools=TOOLS, max_tokens=150).json()
    ids = [block["id"] for block in first["content"] if block["type"] == "tool_use"]
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": first["content"]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": ids[0], "content": "3", "is_error": True},
                {"type": "tool_result", "tool_use_id": "c2", "content": [{"type": "text", "text": "4"}]},
                {"type": "text", "text": "so", "cache_control": {"type": "ephemeral"}},
                {"type": "text", "text": "?"},
            ],
        },
    ]
    answer = 'Let me see.(<think>hm</think>)now{"z": "a"}now{"z": "b"}'
    text = f"<user>hi<assistant>{answer}<tool>3#{ids[0]}<tool>4#c2<user>so\n?"
    assert prompt_of(server, messages=messages) == text
    system = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert prompt_of(server, system=system) == "<system>a\nb<user>hi"
    assert prompt_of(server, system="s", chat_template_kwargs={"mood": "m"}) == "<system>s<user>hi!m"


def test_token_counts(server: ApiServer) -> None:
    before = len(server.generator.calls)
    for fields in ({}, {"system": "be", "tools": TOOLS}, {"thinking": {"type": "disabled"}}):
        reply = server.ask(COUNT, **fields)
        assert reply.status_code == 200, reply.text
        counted = reply.json()["input_tokens"]
        assert message_of(server.ask(MESSAGES, **fields).content).usage.input_tokens == counted
    assert len(server.generator.calls) == before + 3, "counting does not generate"
    assert failure_of(server.ask(COUNT, model="other").content).error.type == "not_found_error"
    assert failure_of(server.ask(COUNT, tools=[{"type": "bash_20250124"}]).content).error.type


def block(kind: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [{"type": kind, **fields}]}]}


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": ...}, "max_tokens"),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": 1000}, "max_tokens"),
    ({"messages": []}, "messages"),
    ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
    ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (block("image", source={}), "messages[0].content[0].type"),
    (block("document", source={}), "messages[0].content[0].type"),
    (block("tool_use", id="x", name="f", input={}), "messages[0].content[0].type"),
    (
        block("tool_result", tool_use_id="x", content=[{"type": "image"}]),
        "messages[0].content[0].content[0].type",
    ),
    (block("text", text="x", citations=[{}]), "messages[0].content[0].citations"),
    (block("text"), "messages[0].content[0].text"),
    ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "tools[0].defer_loading"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "f"}, "tools": TOOLS}, "tool_choice"),
    ({"stop_sequences": ["x"] * 99}, "stop_sequences"),
    ({"output_config": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "output_config.format"),
    ({"container": "c"}, "container"),
    ({"mcp_servers": [{}]}, "mcp_servers"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management"),
    ({"temperature": -1}, "temperature"),
    ({"n": 2}, "n"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals(server: ApiServer, fields: dict[str, Any], param: str) -> None:
    before = len(server.generator.calls)
    reply = server.ask(MESSAGES, **fields)
    failure = failure_of(reply.content)
    assert (reply.status_code, failure.error.type) == (400, "invalid_request_error")
    assert param in failure.error.message
    assert failure.request_id == reply.headers["request-id"] == reply.headers["x-request-id"]
    assert len(server.generator.calls) == before


def test_threads_are_refused_as_the_client_expects(server: ApiServer) -> None:
    """`tool_runner` of the client begins with a thread, and then sends the whole conversation in each request."""
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}):
        failure = failure_of(server.ask(MESSAGES, thread=thread).content)
        assert failure.error.details == {
            "error_code": "thread_unsupported_request",
            "unsupported": ["thread"],
        }
    assert failure_of(server.ask(MESSAGES, container="c").content).error.details is None


def test_other_errors(server: ApiServer) -> None:
    def failed(reply: httpx.Response) -> tuple[int, str]:
        return reply.status_code, failure_of(reply.content).error.type

    assert failed(server.ask(MESSAGES, model="other")) == (404, "not_found_error")
    assert failed(server.client.post(MESSAGES + "/batches")) == (404, "not_found_error")
    assert failed(server.client.get(MESSAGES)) == (405, "invalid_request_error")
    assert failed(server.client.post(MESSAGES, content=b"{")) == (400, "invalid_request_error")
    assert failed(server.ask(MESSAGES, system="x" * (1 << 16))) == (413, "request_too_large")
    kinds = [
        (BusyError("full", retry_after_s=2), 429, "rate_limit_error"),
        (RequestTimeoutError("late"), 504, "timeout_error"),
        (RequestError("no finite logits"), 500, "api_error"),
        (PeerLostError("lost it"), 503, "overloaded_error"),
    ]
    for error, status, kind in kinds:
        server.set(error=error, fail_after=0)
        for stream in (False, True):
            assert failed(server.ask(MESSAGES, stream=stream)) == (status, kind)
    server.set(error=None)


def test_a_fault_in_mid_stream(server: ApiServer) -> None:
    server.set(answer=b"abc", error=PeerLostError("lost it"), fail_after=2)
    last = events_of(server.ask(MESSAGES, stream=True).content)[-1]
    server.set(error=None)
    assert isinstance(last, Failure)
    assert (last.error.type, last.error.message) == ("overloaded_error", "lost it")


def test_a_client_that_leaves(server: ApiServer) -> None:
    server.set(answer=None, hold_after=1)
    aborted = len(server.generator.aborted)
    with httpx.stream("POST", server.url + MESSAGES, json=body(MESSAGES, stream=True)) as reply:
        assert next(reply.iter_lines()) == "event: message_start"
    until(lambda: len(server.generator.aborted) == aborted + 1)
    server.set(hold_after=None)


def test_keys_and_a_full_server() -> None:
    with ApiServer("key", max_running=1, max_queued=1) as server:

        def asked(path: str = MESSAGES, **headers: str) -> httpx.Response:
            return server.client.post(path, json=body(path), headers=headers)

        for headers in ({}, {"x-api-key": "no"}, {"authorization": "Bearer no"}, {"authorization": "key"}):
            reply = asked(**headers)
            assert (reply.status_code, failure_of(reply.content).error.type) == (401, "authentication_error")
        both = {"x-api-key": "no", "authorization": "Bearer key"}
        for headers in ({"x-api-key": "key"}, {"authorization": "Bearer key"}, both):
            assert asked(**headers).status_code == asked(COUNT, **headers).status_code == 200
        server.client.headers["x-api-key"] = "key"
        with filled(server, MESSAGES):
            busy, counted = server.ask(MESSAGES), server.ask(COUNT)
        assert (busy.status_code, failure_of(busy.content).error.type) == (429, "rate_limit_error")
        assert "retry-after" in busy.headers
        assert counted.status_code == 200, "counting needs no place"
