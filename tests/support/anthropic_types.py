"""Replies and events of Anthropic's `/v1/messages`, typed after its documented schema; other fields are errors."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType


class Typed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Base of objects with a `type`."""


class Plain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of objects without a `type`."""


class Text(Typed, frozen=True, kw_only=True, tag="text"):
    text: str


class Thinking(Typed, frozen=True, kw_only=True, tag="thinking"):
    thinking: str
    signature: str


class ToolUse(Typed, frozen=True, kw_only=True, tag="tool_use"):
    id: str
    name: str
    input: dict[str, Any]


ContentBlock = Text | Thinking | ToolUse
StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class OutputDetails(Plain, frozen=True, kw_only=True):
    thinking_tokens: int


class Usage(Plain, frozen=True, kw_only=True):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputDetails


class Message(Typed, frozen=True, kw_only=True, tag="message"):
    id: str
    role: Literal["assistant"]
    model: str
    content: list[ContentBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: Usage


class TextDelta(Typed, frozen=True, kw_only=True, tag="text_delta"):
    text: str


class ThinkingDelta(Typed, frozen=True, kw_only=True, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Typed, frozen=True, kw_only=True, tag="signature_delta"):
    signature: str


class InputDelta(Typed, frozen=True, kw_only=True, tag="input_json_delta"):
    partial_json: str


class StopDelta(Plain, frozen=True, kw_only=True):
    stop_reason: StopReason
    stop_sequence: str | None


class ErrorFields(Plain, frozen=True, kw_only=True):
    type: Literal[
        "invalid_request_error",
        "authentication_error",
        "not_found_error",
        "request_too_large",
        "rate_limit_error",
        "api_error",
        "overloaded_error",
        "timeout_error",
    ]
    message: str
    details: dict[str, Any] | None = None


class Failure(Typed, frozen=True, kw_only=True, tag="error"):
    error: ErrorFields
    request_id: str


class MessageStart(Typed, frozen=True, kw_only=True, tag="message_start"):
    message: Message


class BlockStart(Typed, frozen=True, kw_only=True, tag="content_block_start"):
    index: int
    content_block: ContentBlock


class BlockDelta(Typed, frozen=True, kw_only=True, tag="content_block_delta"):
    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(Typed, frozen=True, kw_only=True, tag="content_block_stop"):
    index: int


class MessageDelta(Typed, frozen=True, kw_only=True, tag="message_delta"):
    delta: StopDelta
    usage: Usage | UnsetType = UNSET


class MessageStop(Typed, frozen=True, kw_only=True, tag="message_stop"):
    pass


MessageEvent = MessageStart | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Failure
_EVENTS = msgspec.json.Decoder[MessageEvent](MessageEvent)
_MESSAGES = msgspec.json.Decoder(Message)
_FAILURES = msgspec.json.Decoder(Failure)


def message_of(body: bytes) -> Message:
    """A whole reply."""
    return _MESSAGES.decode(body)


def failure_of(body: bytes) -> Failure:
    """The body of an error."""
    return _FAILURES.decode(body)


def events_of(body: bytes) -> list[MessageEvent]:
    """The events of a stream; the name of each must be its `type`."""
    events = []
    for part in body.decode().removesuffix("\n\n").split("\n\n"):
        name, data = part.split("\n")
        decoded = _EVENTS.decode(data.removeprefix("data: "))
        assert name == f"event: {decoded.__struct_config__.tag}"
        events.append(decoded)
    return events


def accumulated(events: list[MessageEvent]) -> Message:
    """The message of a whole stream, collected as a client does. Fails for events in a wrong order."""
    start, *middle, delta, stop = events
    assert isinstance(start, MessageStart)
    assert (start.message.content, start.message.stop_reason) == ([], None)
    assert isinstance(delta, MessageDelta)
    assert isinstance(stop, MessageStop)
    content: list[dict[str, Any]] = []
    open_block: int | None = None
    for event in middle:
        match event:
            case BlockStart(index=index, content_block=block):
                assert (open_block, index) == (None, len(content))
                open_block = index
                content.append(msgspec.to_builtins(block) | ({"input": ""} if block == _empty(block) else {}))
            case BlockDelta(index=index, delta=new):
                assert index == open_block
                _add(content[index], new)
            case BlockStop(index=index):
                assert index == open_block
                open_block = None
            case _:
                raise AssertionError(f"{event} is between the first and the last events")
    assert open_block is None
    for fields in content:
        if fields["type"] == "tool_use":
            fields["input"] = msgspec.json.decode(fields["input"])
    message = msgspec.to_builtins(start.message) | {"content": content}
    message |= msgspec.to_builtins(delta.delta) | {"usage": msgspec.to_builtins(delta.usage)}
    return msgspec.convert(message, Message)


def _empty(block: ContentBlock) -> ContentBlock | None:
    return msgspec.structs.replace(block, input={}) if isinstance(block, ToolUse) else None


def _add(block: dict[str, Any], new: TextDelta | ThinkingDelta | SignatureDelta | InputDelta) -> None:
    match new:
        case TextDelta(text=text):
            block["text"] += text
        case ThinkingDelta(thinking=text):
            block["thinking"] += text
        case SignatureDelta(signature=text):
            block["signature"] += text
        case InputDelta(partial_json=text):
            block["input"] += text
