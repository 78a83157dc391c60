"""The Agents SDK (`openai-agents`) over chat completions and over responses.

The model is random, so a grammar must force each step: `tool_choice` for calls, `output_type` for the end of a run.
"""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    SQLiteSession,
    function_tool,
    handoff,
    set_tracing_disabled,
)
from agents.result import RunResultBase
from common import Checks, equal, target
from openai import AsyncOpenAI
from pydantic import BaseModel

City = Literal["Paris", "Rome", "Oslo"]


class Report(BaseModel):
    """The last answer of a run."""

    city: City
    warm: bool


def kinds(result: RunResultBase) -> list[str]:
    """Returns the types of the items of a run."""
    return [item.type for item in result.new_items]


class Agents:
    """The checks of one of the two models."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.asked: list[str] = []

    def agent(self, **fields: Any) -> Agent[None]:
        """An agent with a tool."""

        @function_tool
        def weather(city: City) -> str:
            """Returns the weather of a city."""
            self.asked.append(city)
            return f"It is 18 degrees in {city}."

        settings = ModelSettings(
            tool_choice="required", max_tokens=600, include_usage=True, parallel_tool_calls=False
        )
        given: dict[str, Any] = {"name": "reporter", "tools": [weather], "model_settings": settings}
        return Agent(**given | fields, instructions="Use tools.", model=self._model)

    def _called(self, result: RunResultBase) -> str:
        assert isinstance(result.final_output, Report)
        calls, usage = len(self.asked), result.context_wrapper.usage
        assert calls
        self.asked.clear()
        equal(kinds(result), ["tool_call_item", "tool_call_output_item"] * calls + ["message_output_item"])
        equal(usage.requests, calls + 1)
        assert usage.output_tokens
        return f"{calls} calls, {result.final_output!r}, {usage.output_tokens} tokens"

    async def called(self) -> str:
        """A call of a function, then a structured answer."""
        return self._called(await Runner.run(self.agent(output_type=Report), "How warm is it?"))

    async def streamed(self) -> str:
        """The same, streamed."""
        result = Runner.run_streamed(self.agent(output_type=Report), "How warm is it?")
        events = [event.type async for event in result.stream_events()]
        return f"{self._called(result)}, {len(events)} events"

    async def handed(self) -> str:
        """One agent hands the conversation to another one."""
        second = self.agent(name="second", output_type=Report)
        first = self.agent(name="first", tools=[], handoffs=[handoff(second)])
        result = await Runner.run(first, "How warm is it?")
        equal(result.last_agent.name, "second")
        assert isinstance(result.final_output, Report)
        self.asked.clear()
        return ", ".join(kinds(result))

    async def remembered(self) -> str:
        """Two runs in one session: the second one sends items of the first one."""
        session = SQLiteSession("one")
        agent = self.agent(output_type=Report)
        for _ in range(2):
            result = await Runner.run(agent, "How warm is it?", session=session)
            assert isinstance(result.final_output, Report)
        self.asked.clear()
        return f"{len(await session.get_items())} items"


async def main() -> None:
    """Runs all checks with both models."""
    server, checks = target(), Checks("openai-agents")
    set_tracing_disabled(True)
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key=server.key, max_retries=0) as client:
        for name, model in (
            ("chat completions", OpenAIChatCompletionsModel(server.model, client)),
            ("responses", OpenAIResponsesModel(server.model, client)),
        ):
            one = Agents(model)
            await checks.wait(f"{name}: function tool, output_type", one.called)
            await checks.wait(f"{name}: the same, streamed", one.streamed)
            await checks.wait(f"{name}: handoff", one.handed)
            await checks.wait(f"{name}: session of two runs", one.remembered)


if __name__ == "__main__":
    asyncio.run(main())
