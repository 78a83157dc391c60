"""Translates the items of `input` to messages of a chat."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from disagg.api.body import to_struct
from disagg.api.chat_request import call_arguments
from disagg.api.errors import bad, unsupported_type
from disagg.api.fields import CalledFunction, PromptMessage, RequestedCall
from disagg.api.openai_responses.fields import (
    ITEM_OFF,
    CallItem,
    CallOutputItem,
    MessageItem,
    ReasoningItem,
    ResponsesBody,
    TextPart,
)


def messages_of(body: ResponsesBody) -> list[PromptMessage]:
    """Returns the conversation of a request. Raises a 400.

    Instructions and the system messages that follow them become one message: many chat templates read only the first.
    """
    if isinstance(body.input, str):
        messages = [PromptMessage(role="user", content=body.input)]
    elif not body.input:
        raise bad("input", "input is empty")
    else:
        messages = _Items(body.input).messages
    if body.instructions:
        messages.insert(0, PromptMessage(role="system", content=body.instructions))
    first = list(takewhile(lambda message: message.role in ("system", "developer"), messages))
    if len(first) < 2:
        return messages
    text = "\n\n".join(str(message.content) for message in first)
    return [PromptMessage(role="system", content=text), *messages[len(first) :]]


class _Items:
    """Collects the messages of `input`. Reasoning, a message and calls of one answer become one message."""

    def __init__(self, items: Sequence[dict[str, Any]]) -> None:
        self.messages: list[PromptMessage] = []
        kinds: dict[str, Callable[[dict[str, Any], str], None]] = {
            "message": self._message,
            "function_call": self._call,
            "function_call_output": self._call_output,
            "reasoning": self._reasoning,
        }
        for number, item in enumerate(items):
            at, kind = f"input[{number}].", item.get("type") or "message"
            add = kinds.get(kind) if isinstance(kind, str) else None
            if add is None:
                raise unsupported_type(at, kind, f"; types are {', '.join(kinds)}")
            add(item, at)

    def _message(self, item: dict[str, Any], at: str) -> None:
        message = to_struct(item, MessageItem, ITEM_OFF, at)
        text = _text(message.content, f"{at}content")
        if message.role != "assistant":
            self.messages.append(PromptMessage(role=message.role, content=text))
            return
        last = self._answer()
        if last.content is not None or last.tool_calls:
            last = PromptMessage(role="assistant")
            self.messages.append(last)
        self.messages[-1] = msgspec.structs.replace(last, content=text)

    def _reasoning(self, item: dict[str, Any], at: str) -> None:
        text = "".join(part.text for part in to_struct(item, ReasoningItem, ITEM_OFF, at).content)
        if text:
            self.messages.append(PromptMessage(role="assistant", reasoning_content=text))

    def _call(self, item: dict[str, Any], at: str) -> None:
        call = to_struct(item, CallItem, ITEM_OFF, at)
        call_arguments(call.arguments, f"{at}arguments")
        requested = RequestedCall(
            id=call.call_id, function=CalledFunction(name=call.name, arguments=call.arguments)
        )
        self._answer().tool_calls.append(requested)  # the list belongs to this message alone

    def _call_output(self, item: dict[str, Any], at: str) -> None:
        result = to_struct(item, CallOutputItem, ITEM_OFF, at)
        text = _text(result.output, f"{at}output")
        self.messages.append(PromptMessage(role="tool", content=text, tool_call_id=result.call_id))

    def _answer(self) -> PromptMessage:
        """Returns the last message if it is the assistant's, else adds an empty one."""
        if not self.messages or self.messages[-1].role != "assistant":
            self.messages.append(PromptMessage(role="assistant"))
        return self.messages[-1]


def _text(content: str | list[dict[str, Any]], at: str) -> str:
    """Returns the text of a message or of a call's result. Raises a 400 for parts that are not text."""
    if isinstance(content, str):
        return content
    return "\n".join(_part(part, f"{at}[{number}].") for number, part in enumerate(content))


def _part(part: dict[str, Any], at: str) -> str:
    kind = part.get("type")
    if kind in ("input_image", "input_file", "input_audio", "refusal"):
        raise unsupported_type(at, kind, ": this server reads only text")
    return to_struct(part, TextPart, {}, at).text
