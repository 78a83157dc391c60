"""Chat with tools and reasoning: requests to the chat template, whole replies, streams, ends."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import ApiServer
from openai import OpenAI

CHAT = "/v1/chat/completions"
TEMPLATE = (
    "{% if tools %}{% for t in tools %}[{{ t.function.name }}]{% endfor %}<tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% if m.reasoning_content %}"
    "(<think>{{ m.reasoning_content }}</think>){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if mood is defined %}!{{ mood }}{% endif %}{% if reasoning_effort %}~{{ reasoning_effort }}{% endif %}"
    "{% if enable_thinking is defined and not enable_thinking %}-{% endif %}"
    "{% if think %}<think>\n{% endif %}"
)
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name":"now","arguments":{"z":"%s"}}</tool_call>'
ANSWER = "<think>hm</think>Let me see." + CALL % "a" + CALL % "b"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(template=TEMPLATE) as running:
        yield running


def answered(server: ApiServer, answer: str, **fields: Any) -> dict[str, Any]:
    """The choice of a whole reply to a request with `TOOLS`."""
    server.set(answer=answer.encode())
    reply = server.ask(CHAT, **{"tools": TOOLS, "max_tokens": 150, **fields})
    assert reply.status_code == 200, reply.text
    choice: dict[str, Any] = reply.json()["choices"][0]
    return choice


def prompt_of(server: ApiServer, **fields: Any) -> str:
    """What the engine gets of a request."""
    answered(server, "x", **{"tools": [], "max_tokens": 9, **fields})
    return bytes(server.generator.calls[-1][1]).decode()


def calls_in(message: Any) -> list[tuple[str, Any]]:
    return [
        (one["function"]["name"], json.loads(one["function"]["arguments"])) for one in message["tool_calls"]
    ]


def test_the_parsers_are_those_of_the_template(server: ApiServer) -> None:
    assert (server.model.parsers.tools, server.model.parsers.reasoning) == ("hermes", "think")


def test_a_whole_reply(server: ApiServer) -> None:
    choice = answered(server, ANSWER)
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "Let me see."
    assert message["reasoning_content"] == message["reasoning"] == "hm"
    assert calls_in(message) == [("now", {"z": "a"}), ("now", {"z": "b"})]
    assert len({one["id"] for one in message["tool_calls"]}) == 2
    assert {one["type"] for one in message["tool_calls"]} == {"function"}


def test_a_stream(server: ApiServer) -> None:
    server.set(answer=ANSWER.encode())
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        tools=TOOLS,  # type: ignore[arg-type]
        max_tokens=150,
        stream=True,
        stream_options={"include_usage": True},
    )
    content, reasoning, finish = "", "", []
    calls: dict[int, list[Any]] = {}
    for chunk in stream:
        for choice in chunk.choices:
            delta = choice.delta
            content += delta.content or ""
            reasoning += getattr(delta, "reasoning_content", None) or ""
            finish += [choice.finish_reason] if choice.finish_reason else []
            for call in delta.tool_calls or ():
                assert call.function is not None
                if call.index not in calls:
                    assert (call.id, call.type) != (None, None), "the first part has id and type"
                    calls[call.index] = [call.function.name, ""]
                calls[call.index][1] += call.function.arguments or ""
    assert (content, reasoning, finish) == ("Let me see.", "hm", ["tool_calls"])
    assert [(name, json.loads(arguments)) for name, arguments in calls.values()] == [
        ("now", {"z": "a"}),
        ("now", {"z": "b"}),
    ]
    assert chunk.usage is not None
    assert chunk.usage.completion_tokens == len(ANSWER)


@pytest.mark.parametrize("stream", [False, True])
def test_one_call_only(server: ApiServer, stream: bool) -> None:
    server.set(answer=ANSWER.encode())
    fields = {"tools": TOOLS, "parallel_tool_calls": False, "max_tokens": 150}
    reply = server.ask(CHAT, stream=stream, **fields).text
    assert reply.count('"index":0,"function"' if stream else '"name":"now"') == 1
    assert '"index":1,"function"' not in reply


def test_without_tools_calls_are_text(server: ApiServer) -> None:
    for fields in ({"tools": []}, {"tool_choice": "none"}):
        choice = answered(server, ANSWER, **fields)
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == ANSWER.removeprefix("<think>hm</think>")
        assert "tool_calls" not in choice["message"]


def test_a_truncated_call_is_text(server: ApiServer) -> None:
    choice = answered(server, CALL % "a", max_tokens=20)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("length", (CALL % "a")[:20])


def test_each_of_n_answers_has_its_own_parser(server: ApiServer) -> None:
    server.set(answer=ANSWER.encode())
    choices = server.ask(CHAT, tools=TOOLS, n=3, max_tokens=150).json()["choices"]
    assert [len(calls_in(choice["message"])) for choice in choices] == [2, 2, 2]


def test_log_probabilities_of_each_token(server: ApiServer) -> None:
    server.set(answer=ANSWER.encode())
    fields = {"tools": TOOLS, "logprobs": True, "max_tokens": 150}
    events = server.ask(CHAT, stream=True, **fields).text.split("\n\n")[:-2]
    choices = [json.loads(one.removeprefix("data: "))["choices"][0] for one in events]
    tokens = [
        one["token"] for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]
    ]
    assert "".join(tokens) == ANSWER


def test_reasoning_that_the_prompt_begins(server: ApiServer) -> None:
    message = answered(server, "hm</think>yes", chat_template_kwargs={"think": True})["message"]
    assert (message["reasoning_content"], message["content"]) == ("hm", "yes")
    message = answered(server, "hm</think>yes")["message"]
    assert message["content"] == "hm</think>yes"


def test_messages_reach_the_template(server: ApiServer) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"z": "a"}'}}
    messages = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "3"}]},
    ]
    text = prompt_of(server, messages=messages)
    assert text == '<user>hi<assistant>(<think>hm</think>)now{"z": "a"}<tool>3#c1'


def test_tools_and_options_reach_the_template(server: ApiServer) -> None:
    answered(server, "x", chat_template_kwargs={"mood": "glad"}, reasoning_effort="low")
    prompt = bytes(server.generator.calls[-1][1]).decode()
    assert prompt == "[now]<tool_call><user>hi!glad~low"
    assert prompt_of(server, reasoning_effort="none") == "<user>hi~none-"
    reply = server.client.post(
        "/tokenize",
        json={"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS, "reasoning_effort": "low"},
    )
    assert bytes(reply.json()["tokens"]) == b"[now]<tool_call><user>hi~low"


def test_a_parsed_message_is_sent_back(server: ApiServer) -> None:
    """`parse()` of the client adds fields to a message, which the client sends with the rest."""
    server.set(answer=(CALL % "a").encode())
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    [tool] = TOOLS
    strict = {"name": "now", "strict": True, "parameters": {"type": "object"}}
    messages: list[Any] = [{"role": "user", "content": "hi"}]
    fields: Any = {"model": "tiny", "max_tokens": 70, "tools": [{**tool, "function": strict}]}
    message = client.chat.completions.parse(messages=messages, **fields).choices[0].message
    [call] = message.tool_calls or []
    assert call.function.parsed_arguments == {"z": "a"}
    server.set(answer=b'{"x": 1}')
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "noon"}]
    after = client.chat.completions.parse(
        messages=messages, response_format={"type": "json_object"}, **fields
    )
    assert after.choices[0].message.content == '{"x": 1}'
    again = [*messages, {**after.choices[0].message.to_dict(), "parsed": {"x": 1}}]
    assert client.chat.completions.create(messages=again, **fields).choices[0].message.content == '{"x": 1}'


def test_a_template_that_fails(server: ApiServer) -> None:
    with ApiServer(template="{{ messages[0].content + 3 }}") as other:
        reply = other.ask(CHAT)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages")


def test_a_parser_by_name() -> None:
    with ApiServer(tool_parser="mistral", reasoning_parser="none") as other:
        answer = '<think>[TOOL_CALLS]now[ARGS]{"z": "a"}'
        message = answered(other, answer)["message"]
    assert message["content"] == "<think>"
    assert calls_in(message) == [("now", {"z": "a"})]
    [call] = message["tool_calls"]
    assert len(call["id"]) == 9, "mistral's templates take nothing else"
