"""`/v1/responses` with OpenAI's client: items, events, conversations, refusals, faults."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from api_server import ApiServer, body
from conditions import until
from openai import OpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from test_api_life import filled
from test_api_tools import ANSWER, CALL, TEMPLATE

from disagg.core.errors import BusyError, PeerLostError, RequestError
from disagg.model.load.tiny import EOS_ID

RESPONSES = "/v1/responses"
TOOLS: list[Any] = [
    {"type": "function", "name": "now", "parameters": {"type": "object"}, "strict": None},
    {"type": "function", "name": "then", "strict": None, "description": "d"},
]
EVENTS = TypeAdapter[ResponseStreamEvent](ResponseStreamEvent)
REASONING_EVENTS = ["output_item.added", "content_part.added", *["reasoning_text.delta"] * 2]
REASONING_EVENTS += ["reasoning_text.done", "content_part.done", "output_item.done"]
TEXT_EVENTS = [name.replace("reasoning_text", "output_text") for name in REASONING_EVENTS]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
CALL_EVENTS += ["output_item.done"]


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(template=TEMPLATE) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: ApiServer) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as running:
        yield running


def created(server: ApiServer, answer: str, **fields: Any) -> Response:
    """A whole response, which must have exactly the types of OpenAI's client."""
    server.set(answer=answer.encode(), error=None, cached_tokens=None)
    reply = server.ask(RESPONSES, **{"tools": TOOLS, "max_output_tokens": 150, **fields})
    assert reply.status_code == 200, reply.text
    return Response.model_validate(reply.json(), strict=True)


def streamed(client: OpenAI, **fields: Any) -> list[Any]:
    """The events of a response, numbered and typed."""
    given = {"model": "tiny", "input": "hi", "tools": TOOLS, "max_output_tokens": 150, **fields}
    events = list(client.responses.create(stream=True, **given))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    for event in events:
        EVENTS.validate_python(event.to_dict(), strict=True)
    return events


def prompt_of(server: ApiServer, **fields: Any) -> str:
    created(server, "x", **{"tools": [], "max_output_tokens": 9, **fields})
    return bytes(server.generator.calls[-1][1]).decode()


def shown(response: Response) -> list[Any]:
    """The kinds and texts of the items."""
    found: list[Any] = []
    for item in response.output:
        if item.type == "function_call":
            found.append((item.type, item.name, item.arguments, item.status))
        elif item.type in ("message", "reasoning"):
            assert item.content
            found.append((item.type, item.content[0].text, item.status))
    return found


def test_a_whole_response(server: ApiServer) -> None:
    server.set(cached_tokens=5)
    response = created(server, ANSWER, metadata={"a": "b"}, reasoning={"effort": "low"})
    assert (response.status, response.error, response.incomplete_details) == ("completed", None, None)
    assert shown(response) == [
        ("reasoning", "hm", "completed"),
        ("message", "Let me see.", "completed"),
        ("function_call", "now", '{"z": "a"}', "completed"),
        ("function_call", "now", '{"z": "b"}', "completed"),
    ]
    assert len({item.id for item in response.output}) == 4  # type: ignore[union-attr]
    assert response.output_text == "Let me see."
    assert (response.metadata, response.tool_choice, response.tools[1].type) == (
        {"a": "b"},
        "auto",
        "function",
    )
    assert response.id.startswith("resp_")


def test_usage(server: ApiServer) -> None:
    server.set(answer=ANSWER.encode(), cached_tokens=5)
    usage = Response.model_validate(server.ask(RESPONSES, max_output_tokens=150).json()).usage
    assert usage is not None
    assert (usage.input_tokens, usage.input_tokens_details.cached_tokens) == (len("<user>hi"), 5)
    assert usage.output_tokens == len(ANSWER)
    assert usage.output_tokens_details.reasoning_tokens == len("<think>hm")
    assert usage.total_tokens == len("<user>hi") + len(ANSWER)


def test_a_stream(server: ApiServer, client: OpenAI) -> None:
    whole = created(server, "<think>hm</think>Ok" + CALL % "a" + CALL % "b")
    events = streamed(client)
    kinds = ["created", "in_progress", *REASONING_EVENTS, *TEXT_EVENTS, *CALL_EVENTS, *CALL_EVENTS]
    assert [event.type.removeprefix("response.") for event in events] == [*kinds, "completed"]
    final = events[-1].response
    assert shown(final) == shown(whole)
    assert final.usage == whole.usage
    assert [event.item for event in events if event.type == "response.output_item.done"] == final.output
    for event in events:
        index = getattr(event, "output_index", None)
        if index is not None and hasattr(event, "item_id"):
            assert event.item_id == final.output[index].id
    assert events[0].response.status == events[1].response.status == "in_progress"
    assert {event.response.id for event in (events[0], events[-1])} == {final.id}


def test_the_clients_own_accumulation(server: ApiServer, client: OpenAI) -> None:
    server.set(answer=ANSWER.encode())
    with client.responses.stream(model="tiny", input="hi", tools=TOOLS, max_output_tokens=150) as stream:
        final = stream.get_final_response()
    assert final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]


def test_truncated_and_empty_answers(server: ApiServer, client: OpenAI) -> None:
    response = created(server, ANSWER, max_output_tokens=25)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert shown(response) == [("reasoning", "hm", "completed"), ("message", "Let me s", "incomplete")]
    assert streamed(client, max_output_tokens=25)[-1].type == "response.incomplete"
    response = created(server, CALL % "a", max_output_tokens=20)
    assert shown(response) == [("message", (CALL % "a")[:20], "incomplete")], "a truncated call is text"
    response = created(server, "<think>hm", max_output_tokens=8)
    assert shown(response) == [("reasoning", "h", "incomplete")]
    server.set(answer=[EOS_ID])
    assert shown(streamed(client)[-1].response) == [("message", "", "completed")]


def test_calls_that_are_required(server: ApiServer, client: OpenAI) -> None:
    for choice in ({"type": "function", "name": "then"}, "required"):
        created(server, "x", tool_choice=choice)
        assert server.generator.calls[-1][2].grammar
    server.set(answer=b'{"z": 3}')
    events = streamed(client, tool_choice={"type": "function", "name": "then"})
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert len(deltas) > 1, "arguments arrive as they are generated"
    assert "".join(deltas) == '{"z": 3}'
    assert shown(events[-1].response) == [("function_call", "then", '{"z": 3}', "completed")]
    assert events[-1].response.tool_choice.name == "then"


def test_one_call_only(server: ApiServer) -> None:
    response = created(server, ANSWER, parallel_tool_calls=False)
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


def test_formats_become_grammars(server: ApiServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    for text in (
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}},
    ):
        response = created(server, "{}", tools=[], text=text)
        assert server.generator.calls[-1][2].grammar
        assert response.text is not None
        assert response.text.format is not None
        assert response.text.format.type == text["format"]["type"]
    created(server, "{}", tools=[], text={"format": {"type": "text"}, "verbosity": "medium"})
    assert not server.generator.calls[-1][2].grammar


class Person(BaseModel):
    """An answer's type."""

    name: str


def test_the_clients_own_types(server: ApiServer, client: OpenAI) -> None:
    server.set(answer=b'{"name": "Ann"}', error=None)
    response = client.responses.parse(model="tiny", input="hi", text_format=Person, max_output_tokens=50)
    assert response.output_parsed == Person(name="Ann")
    assert server.generator.calls[-1][2].grammar


def test_fields_reach_the_engine(server: ApiServer) -> None:
    fields = {"temperature": 0.5, "top_p": 0.25, "top_k": 3, "seed": 4, "prompt_cache_key": "s"}
    created(server, "x", cache_salt="salt", ignore_eos=True, min_tokens=2, **fields)
    sampling = server.generator.calls[-1][2]
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.5, 0.25, 3, 4)
    assert (sampling.ignore_eos, sampling.min_tokens) == (True, 2)
    assert (server.generator.salts[-1], server.generator.sessions[-1]) == ("salt", "s")


def test_options_of_chat_streams_are_accepted(server: ApiServer) -> None:
    """Load generators send them to all routes; the last event has the usage anyway."""
    reply = server.ask("/v1/responses", input="hi", stream=True, stream_options={"include_usage": True})
    assert reply.status_code == 200, reply.text
    assert '"usage":{"input_tokens":' in reply.text


def test_a_conversation_reaches_the_template(server: ApiServer) -> None:
    first = created(server, ANSWER)
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}],
        },
        *[item.model_dump() for item in first.output],
        {"type": "function_call_output", "call_id": "c1", "output": "3"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "4"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}]},
        {"type": "message", "role": "assistant", "content": "that"},
        {"role": "system", "content": "late"},
    ]
    text = '<user>a\nb<assistant>Let me see.(<think>hm</think>)now{"z": "a"}now{"z": "b"}'
    assert (
        prompt_of(server, input=items)
        == text + "<tool>3#c1<tool>4#c2<assistant>so<assistant>that<system>late"
    )


def test_instructions_and_options(server: ApiServer) -> None:
    items = [{"role": "developer", "content": "d"}, {"role": "user", "content": "u"}]
    assert prompt_of(server, input=items) == "<system>d<user>u"
    assert prompt_of(server, instructions="i", input=items) == "<system>i\n\nd<user>u"
    assert prompt_of(server, instructions="i", reasoning={"effort": "none"}) == "<system>i<user>hi~none-"
    assert prompt_of(server, chat_template_kwargs={"mood": "m"}) == "<user>hi!m"
    created(server, "x")
    assert bytes(server.generator.calls[-1][1]) == b"[now][then]<tool_call><user>hi"


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"previous_response_id": "resp_1"}, "previous_response_id"),
    ({"conversation": "c"}, "conversation"),
    ({"store": True}, "store"),
    ({"background": True}, "background"),
    ({"prompt": {"id": "p"}}, "prompt"),
    ({"truncation": "auto"}, "truncation"),
    ({"top_logprobs": 2}, "top_logprobs"),
    ({"max_tool_calls": 2}, "max_tool_calls"),
    ({"include": ["message.output_text.logprobs"]}, "include[0]"),
    ({"stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ({"reasoning": {"summary": "detailed"}}, "reasoning.summary"),
    ({"text": {"verbosity": "low"}}, "text.verbosity"),
    ({"text": {"format": {"type": "json_schema", "schema": {"type": 3}}}}, "text.format"),
    ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
    ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0].type"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tool_choice": {"type": "web_search_preview"}}, "tool_choice.type"),
    ({"input": []}, "input"),
    ({"input": [3]}, "input[0]"),
    ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
    ({"input": [{"type": {}, "id": "x"}]}, "input[0].type"),
    ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
    ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
    ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "input[0].content[0].type"),
    ({"input": [{"type": "reasoning", "encrypted_content": "x"}]}, "input[0].encrypted_content"),
    (
        {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "{"}]},
        "input[0].arguments",
    ),
    ({"max_output_tokens": 0}, "max_output_tokens"),
    ({"temperature": -1.0}, "temperature"),
    ({"messages": []}, "messages"),
    ({"model": "other"}, "model"),
]


@pytest.mark.parametrize(("fields", "param"), REFUSED)
def test_refusals(server: ApiServer, fields: dict[str, Any], param: str) -> None:
    before = len(server.generator.calls)
    reply = server.ask(RESPONSES, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (404 if param == "model" else 400, param), error
    assert error["type"] == "invalid_request_error"
    assert param.split(".")[0].split("[")[0] in error["message"]
    assert "messages" not in error["message"] or param == "messages"
    assert len(server.generator.calls) == before


def test_a_context_that_is_too_small_names_this_apis_fields(server: ApiServer) -> None:
    error = server.ask(RESPONSES, max_output_tokens=1000).json()["error"]
    assert (error["param"], error["code"]) == ("input", "context_length_exceeded")
    assert "max_output_tokens" in error["message"]


@pytest.mark.parametrize("stream", ["true", "false"])
def test_schemas_of_any_depth(server: ApiServer, stream: str) -> None:
    server.set(answer=b"x", error=None)
    tool = '[{"type": "function", "name": "f", "parameters": %s}]'
    raw = '{"model": "tiny", "input": "hi", "tool_choice": "none", "stream": %s, "tools": %s}'
    statuses = set()
    for depth in range(940, 1000, 3):  # the deepest are refused as JSON
        reply = server.client.post(
            RESPONSES, content=raw % (stream, tool % ('{"a":' * depth + "{}" + "}" * depth))
        )
        statuses.add(reply.status_code)
        assert reply.status_code == 400 or "x" in reply.text
    assert statuses == {200, 400}


def test_accepted_without_effect(server: ApiServer) -> None:
    fields = {"store": False, "background": False, "include": ["reasoning.encrypted_content"]}
    response = created(server, "x", reasoning={"summary": "auto"}, service_tier="auto", user="u", **fields)
    assert (response.to_dict()["store"], response.background, response.user) == (False, False, "u")


def test_a_fault_in_mid_stream(server: ApiServer, client: OpenAI) -> None:
    server.set(answer=b"abc", error=PeerLostError("lost it"), fail_after=2)
    last = streamed(client)[-1]
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert (last.response.error.code, last.response.error.message) == ("server_error", "lost it")
    assert shown(last.response) == [("message", "ab", "incomplete")]
    server.set(error=None)


def test_a_fault_before_the_first_token(server: ApiServer, client: OpenAI) -> None:
    kinds = [(BusyError("full", retry_after_s=2), 429), (RequestError("no finite logits"), 500)]
    for error, status in kinds:
        server.set(error=error, fail_after=0)
        for stream in (False, True):
            with pytest.raises(openai.APIStatusError) as caught:
                client.responses.create(model="tiny", input="hi", stream=stream)
            assert caught.value.status_code == status
    server.set(error=None)


def test_a_client_that_leaves(server: ApiServer) -> None:
    server.set(answer=None, hold_after=1)
    aborted = len(server.generator.aborted)
    with httpx.stream("POST", server.url + RESPONSES, json=body(RESPONSES, stream=True)) as reply:
        lines = reply.iter_lines()
        assert next(lines) == "event: response.created"
        assert json.loads(next(lines).removeprefix("data: "))["sequence_number"] == 0
    until(lambda: len(server.generator.aborted) == aborted + 1)
    server.set(hold_after=None)


def test_a_full_server_and_a_wrong_key() -> None:
    with ApiServer("key", max_running=1, max_queued=1) as server:
        server.client.headers["authorization"] = "Bearer key"
        with filled(server, RESPONSES):
            busy = server.ask(RESPONSES)
        assert (busy.status_code, busy.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert "retry-after" in busy.headers
        headers = {"x-api-key": "key", "authorization": "Bearer no"}
        refused = server.client.post(RESPONSES, json=body(RESPONSES), headers=headers)
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
