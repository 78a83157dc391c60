"""Calls and structured outputs of a real server: a random model gives what the grammar allows."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest
from serve_process import Served

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 6}, "days": {"type": "integer", "maximum": 99}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}]
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_answer_follows_its_schema(served: Served, seed: int) -> None:
    reply = served.client.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        seed=seed,
        max_tokens=200,
        n=2,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
    )
    texts = [choice.message.content or "" for choice in reply.choices]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert texts[0] != texts[1]
    assert {choice.finish_reason for choice in reply.choices} == {"stop"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_be_made(served: Served, choice: Any) -> None:
    fields: Any = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "seed": 4, "max_tokens": 300}
    fields |= {"tool_choice": choice, "parallel_tool_calls": False}
    [whole] = served.client.chat.completions.create(**fields).choices
    [call] = whole.message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    assert (call.function.name, whole.finish_reason) == ("weather", "tool_calls")
    streamed = ""
    for chunk in served.client.chat.completions.create(**fields, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            streamed += part.function.arguments or ""
    assert json.loads(streamed) == json.loads(call.function.arguments)


def test_a_wrong_schema_is_refused_at_once(served: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="response_format"):
        served.client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "?"}}},
        )
