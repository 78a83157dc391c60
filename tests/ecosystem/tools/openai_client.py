"""The client `openai`: chat, streams, tools, structured outputs, responses, errors."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Literal

import openai
from common import Checks, equal, refusal, target
from pydantic import BaseModel, Field

MESSAGES: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
TOKENS = 16


class Trip(BaseModel):
    """A structured answer whose length is limited, because the model is random."""

    city: Literal["Paris", "Rome", "Oslo"]
    days: int = Field(ge=1, le=30)
    by_train: bool


class Weather(BaseModel):
    """Arguments of a tool."""

    city: Literal["Paris", "Rome", "Oslo"]
    unit: Literal["celsius", "fahrenheit"]


class Client:
    """The checks of a client."""

    def __init__(self, client: openai.OpenAI, model: str) -> None:
        self.client, self.model = client, model
        self.fields: Any = {"model": model, "messages": MESSAGES, "temperature": 0, "max_tokens": TOKENS}

    def models(self) -> str:
        equal([one.id for one in self.client.models.list()], [self.model])
        return self.client.models.retrieve(self.model).id

    def completions(self) -> str:
        fields: Any = {"model": self.model, "prompt": "Once upon", "max_tokens": TOKENS, "temperature": 0}
        whole = self.client.completions.create(**fields, logprobs=2, n=1)
        parts = [chunk.choices[0].text for chunk in self.client.completions.create(**fields, stream=True)]
        equal("".join(parts), whole.choices[0].text)
        logprobs = whole.choices[0].logprobs
        assert logprobs
        assert logprobs.tokens
        equal("".join(logprobs.tokens), whole.choices[0].text)
        return f"{len(parts)} chunks, {len(logprobs.tokens)} log-probabilities"

    def chat(self) -> str:
        whole = self.client.chat.completions.create(**self.fields, logprobs=True, top_logprobs=3)
        text = whole.choices[0].message.content or ""
        assert whole.usage
        assert whole.choices[0].logprobs
        assert whole.choices[0].logprobs.content
        equal(whole.usage.completion_tokens, TOKENS)
        equal("".join(one.token for one in whole.choices[0].logprobs.content), text)
        found = ""
        usage = None
        for chunk in self.client.chat.completions.create(
            **self.fields, stream=True, stream_options={"include_usage": True}
        ):
            found += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            usage = chunk.usage or usage
        equal((found, usage and usage.total_tokens), (text, whole.usage.total_tokens))
        return f"{whole.usage.prompt_tokens} + {TOKENS} tokens, stream equal"

    def several(self) -> str:
        reply = self.client.chat.completions.create(**self.fields | {"temperature": 1, "n": 3, "seed": 1})
        texts = {choice.message.content for choice in reply.choices}
        equal(len(texts), 3)
        return "3 choices"

    def tools(self) -> str:
        fields = self.fields | {"max_tokens": 300, "tool_choice": "required", "seed": 3, "temperature": 1}
        fields |= {"tools": [openai.pydantic_function_tool(Weather)], "parallel_tool_calls": False}
        message = self.client.chat.completions.parse(**fields).choices[0].message
        [call] = message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Weather)
        arguments = ""
        with self.client.chat.completions.stream(**fields) as stream:
            for event in stream:
                if event.type == "tool_calls.function.arguments.delta":
                    arguments += event.arguments_delta
            [streamed] = stream.get_final_completion().choices[0].message.tool_calls or []
        equal(json.loads(arguments), json.loads(call.function.arguments))
        equal(streamed.function.parsed_arguments, call.function.parsed_arguments)
        turns = [*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": "18"}]
        after = self.client.chat.completions.create(
            **self.fields | {"messages": turns, "tools": fields["tools"]}
        )
        assert after.choices[0].message.content
        return f"{call.function.name}({call.function.arguments}), streamed equal, answered"

    def parsed(self) -> str:
        fields = self.fields | {"max_tokens": 300, "seed": 5, "temperature": 1}
        trip = self.client.chat.completions.parse(**fields, response_format=Trip).choices[0].message.parsed
        with self.client.chat.completions.stream(**fields, response_format=Trip) as stream:
            for _ in stream:
                pass
            equal(stream.get_final_completion().choices[0].message.parsed, trip)
        assert isinstance(trip, Trip)
        return repr(trip)

    def parsed_beside_tools(self) -> str:
        fields = self.fields | {"max_tokens": 800, "temperature": 1, "parallel_tool_calls": False}
        fields |= {"tools": [openai.pydantic_function_tool(Weather)], "response_format": Trip}
        found = {"Trip": 0, "Weather": 0}
        for seed in range(8):
            message = self.client.chat.completions.parse(**fields, seed=seed).choices[0].message
            calls = [call.function.parsed_arguments for call in message.tool_calls or []]
            [value] = [message.parsed] if message.parsed else calls
            found[type(value).__name__] += 1
        equal(sum(found.values()), 8)
        return f"{found['Trip']} answers, {found['Weather']} calls"

    def responses(self) -> str:
        fields: Any = {"model": self.model, "input": "Hello", "instructions": "Be brief.", "temperature": 0}
        fields |= {"max_output_tokens": TOKENS, "store": False}
        whole = self.client.responses.create(**fields)
        text, last = "", ""
        for event in self.client.responses.create(**fields, stream=True):
            text += event.delta if event.type == "response.output_text.delta" else ""
            last = event.type
        equal((text, last), (whole.output_text, "response.incomplete"))  # by `max_output_tokens`
        chat = self.client.chat.completions.create(**self.fields)
        equal(whole.output_text, chat.choices[0].message.content)
        return "stream and chat equal"

    def responses_tools(self) -> str:
        fields: Any = {"model": self.model, "input": "Weather?", "max_output_tokens": 300, "store": False}
        tool = openai.pydantic_function_tool(Weather)["function"]
        tools: Any = [{"type": "function", **tool}]
        reply = self.client.responses.parse(
            **fields, tools=tools, tool_choice="required", parallel_tool_calls=False
        )
        [call] = [item for item in reply.output if item.type == "function_call"]
        Weather.model_validate_json(call.arguments)
        turns: Any = [{"role": "user", "content": "Weather?"}, *reply.output]
        turns.append({"type": "function_call_output", "call_id": call.call_id, "output": "18"})
        after = self.client.responses.parse(**fields | {"input": turns}, text_format=Trip)
        with self.client.responses.stream(**fields | {"input": turns}, text_format=Trip) as stream:
            for _ in stream:
                pass
            assert isinstance(stream.get_final_response().output_parsed, Trip)
        assert isinstance(after.output_parsed, Trip)
        return f"{call.name}({call.arguments}), then {after.output_parsed!r}"

    def errors(self) -> str:
        create, stranger = self.client.chat.completions.create, self.client.with_options(api_key="wrong")
        found = [
            refusal(openai.NotFoundError, create, **self.fields | {"model": "another"}),
            refusal(openai.BadRequestError, create, **self.fields | {"max_tokens": -1}),
            refusal(openai.BadRequestError, create, **self.fields | {"extra_body": {"no_such_field": 1}}),
            refusal(openai.AuthenticationError, stranger.models.list),
        ]
        equal(found, [404, 400, 400, 401])
        return ", ".join(map(str, found))


async def concurrent(url: str, key: str, fields: Any) -> str:
    """Asks 32 times at once with `AsyncOpenAI`; greedy answers are equal."""
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        replies = await asyncio.gather(*(client.chat.completions.create(**fields) for _ in range(32)))
    equal(len({reply.choices[0].message.content for reply in replies}), 1)
    equal(len({reply.id for reply in replies}), 32)
    return "32 answers equal"


def main() -> None:
    """Runs all checks."""
    server, checks = target(), Checks("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0, timeout=300) as client:
        one = Client(client, server.model)
        checks.run("models", one.models)
        checks.run("completions, whole and streamed", one.completions)
        checks.run("chat, whole and streamed", one.chat)
        checks.run("chat, n = 3", one.several)
        checks.run("chat, AsyncOpenAI", lambda: asyncio.run(concurrent(server.url, server.key, one.fields)))
        checks.run("tool calls, whole and streamed", one.tools)
        checks.run("structured output, parse()", one.parsed)
        checks.run("structured output beside tools", one.parsed_beside_tools)
        checks.run("responses, whole and streamed", one.responses)
        checks.run("responses, tools and parse()", one.responses_tools)
        checks.run("errors", one.errors)


if __name__ == "__main__":
    main()
