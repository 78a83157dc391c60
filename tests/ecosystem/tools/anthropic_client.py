"""The client `anthropic` over `/v1/messages`: messages, streams, tools, structured outputs, counts, errors."""

from __future__ import annotations

from typing import Any

import anthropic
from anthropic import Anthropic, beta_tool
from common import Checks, equal, refusal, target
from pydantic import BaseModel

MESSAGES: Any = [{"role": "user", "content": "Hello"}]
TOKENS = 16
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOLS: Any = [{"name": "weather", "description": "The weather of a city.", "input_schema": SCHEMA}]


class Place(BaseModel):
    """A structured answer."""

    warm: bool
    days: bool


class Client:
    """The checks of a client."""

    def __init__(self, client: Anthropic, model: str) -> None:
        self.client = client
        self.fields: Any = {"model": model, "messages": MESSAGES, "max_tokens": TOKENS}
        self.fields["extra_body"] = {"temperature": 0}  # no argument of this client

    def messages(self) -> str:
        fields = self.fields | {"system": "Be brief."}
        whole = self.client.messages.create(**fields)
        with self.client.messages.stream(**fields) as stream:
            text = "".join(stream.text_stream)
            last = stream.get_final_message()
        [block] = whole.content
        assert block.type == "text"
        equal((text, last.stop_reason), (block.text, whole.stop_reason))
        equal((last.usage.output_tokens, whole.usage.output_tokens), (TOKENS, TOKENS))
        return f"{whole.usage.output_tokens} tokens, {whole.stop_reason}, stream equal"

    def tools(self) -> str:
        fields = self.fields | {"tools": TOOLS, "max_tokens": 300}
        fields |= {"tool_choice": {"type": "any", "disable_parallel_tool_use": True}}
        whole = self.client.messages.create(**fields)
        with self.client.messages.stream(**fields) as stream:
            last = stream.get_final_message()
        [call], [streamed] = whole.content, last.content
        assert call.type == streamed.type == "tool_use"
        equal((streamed.name, streamed.input), (call.name, call.input))
        equal(whole.stop_reason, "tool_use")
        answer = {"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"}
        turns = [
            *MESSAGES,
            {"role": "assistant", "content": whole.content},
            {"role": "user", "content": [answer]},
        ]
        after = self.client.messages.create(**self.fields | {"messages": turns, "tools": TOOLS})
        equal(after.usage.output_tokens, TOKENS)
        return f"{call.name}({call.input}), streamed equal, answered"

    def runner(self) -> str:
        """The client's loop that calls Python functions."""
        asked: list[bool] = []

        @beta_tool
        def weather(celsius: bool) -> str:
            """Returns the weather.

            Args:
                celsius: the unit
            """
            asked.append(celsius)
            return "18"

        fields = self.fields | {"max_tokens": 300, "max_iterations": 2, "tools": [weather]}
        fields["tool_choice"] = {"type": "any", "disable_parallel_tool_use": True}
        replies = [one.stop_reason for one in self.client.beta.messages.tool_runner(**fields)]
        equal((replies, len(asked)), (["tool_use", "tool_use"], 2))
        return f"{len(asked)} calls"

    def parsed(self) -> str:
        message = self.client.messages.parse(**self.fields | {"max_tokens": 200}, output_format=Place)
        assert isinstance(message.parsed_output, Place)
        return repr(message.parsed_output)

    def parsed_beside_tools(self) -> str:
        fields = self.fields | {"max_tokens": 800, "tools": TOOLS}
        fields["tool_choice"] = {"type": "auto", "disable_parallel_tool_use": True}
        found = {"end_turn": 0, "tool_use": 0}
        for seed in range(8):
            body = {"temperature": 1, "seed": seed}
            message = self.client.messages.parse(**fields | {"extra_body": body}, output_format=Place)
            found[str(message.stop_reason)] += 1
            assert message.stop_reason == "tool_use" or isinstance(message.parsed_output, Place)
        return f"{found['end_turn']} answers, {found['tool_use']} calls"

    def counted(self) -> str:
        count = self.client.messages.count_tokens(model=self.fields["model"], messages=MESSAGES).input_tokens
        usage = self.client.messages.create(**self.fields).usage
        equal(usage.input_tokens + (usage.cache_read_input_tokens or 0), count)
        return f"{count} tokens"

    def errors(self) -> str:
        create, stranger = self.client.messages.create, self.client.with_options(api_key="wrong")
        found = [
            refusal(anthropic.NotFoundError, create, **self.fields | {"model": "another"}),
            refusal(anthropic.BadRequestError, create, **self.fields | {"max_tokens": -1}),
            refusal(anthropic.AuthenticationError, stranger.messages.create, **self.fields),
        ]
        equal(found, [404, 400, 401])
        return ", ".join(map(str, found))


def main() -> None:
    """Runs all checks."""
    server, checks = target(), Checks("anthropic")
    with Anthropic(base_url=server.url, api_key=server.key, max_retries=0, timeout=300) as client:
        one = Client(client, server.model)
        checks.run("messages, whole and streamed", one.messages)
        checks.run("tool calls, whole and streamed", one.tools)
        checks.run("tool_runner", one.runner)
        checks.run("structured output, parse()", one.parsed)
        checks.run("structured output beside tools", one.parsed_beside_tools)
        checks.run("count_tokens", one.counted)
        checks.run("errors", one.errors)


if __name__ == "__main__":
    main()
