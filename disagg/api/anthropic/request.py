"""Translates bodies of `/v1/messages` to chat requests."""

from __future__ import annotations

from typing import Any, NamedTuple

from disagg.api.anthropic.conversation import messages_of
from disagg.api.anthropic.fields import (
    CUSTOM_TOOL_OFF,
    MESSAGES_OFF,
    AnyChoice,
    CustomTool,
    MessagesBody,
    NoChoice,
    OneChoice,
    PromptBody,
    ThinkingOff,
)
from disagg.api.body import decode_object, to_struct
from disagg.api.chat_request import chat_generation, chat_prompt, template_turn
from disagg.api.errors import NO_THREADS, ApiError, bad, unsupported_type
from disagg.api.fields import ChatBody, JsonSchema, NamedTool, ResponseFormat, Tool, ToolFunction, ToolName
from disagg.api.generation_request import GenerationRequest, check_model
from disagg.api.model import ServedModel
from disagg.core.config.read import ApiConfig

FIELD_NAMES = {
    "reasoning_effort": "output_config.effort",
    "response_format": "output_config.format",
    "stop": "stop_sequences",
}
"""Names of chat fields in this API, for error messages."""


class ParsedMessages(NamedTuple):
    """A checked request."""

    generation: GenerationRequest
    shows_thinking: bool
    """Whether the reply contains the text of the reasoning."""


async def parse_messages(raw: bytes, model: ServedModel, config: ApiConfig) -> ParsedMessages:
    """Parses a body of `/v1/messages`. Raises an `ApiError` if the body is invalid."""
    body = to_struct(decode_object(raw), MessagesBody, MESSAGES_OFF)
    if body.thread is not None:
        message = (
            "thread is not supported: the server stores no conversations, send all messages in each request"
        )
        raise bad("thread", message, NO_THREADS)
    try:
        generation = await chat_generation(_chat_body(body), _turns(body), model, config)
    except ApiError as error:
        raise error.renamed(FIELD_NAMES) from error
    return ParsedMessages(generation, getattr(body.thinking, "display", None) != "omitted")


async def count_tokens(raw: bytes, model: ServedModel) -> int:
    """Returns the number of prompt tokens for a body of `/v1/messages/count_tokens`. Raises an `ApiError`."""
    body = to_struct(decode_object(raw), PromptBody, MESSAGES_OFF)
    check_model(body.model, model)
    try:
        prompt = await chat_prompt(_chat_body(body), _turns(body), model)
    except ApiError as error:
        raise error.renamed(FIELD_NAMES) from error
    return len(prompt.rendered.tokens)


def _turns(body: PromptBody) -> list[dict[str, Any]]:
    return [template_turn(message, "messages.") for message in messages_of(body)]


def _chat_body(body: PromptBody) -> ChatBody:
    options = dict(body.chat_template_kwargs)
    if body.thinking is not None:
        options.setdefault("enable_thinking", not isinstance(body.thinking, ThinkingOff))
    output = body.output_config
    prompt: dict[str, Any] = {
        "model": body.model,
        "messages": [],
        "tools": [_tool(tool, f"tools[{number}].") for number, tool in enumerate(body.tools)],
        "tool_choice": _choice(body),
        "parallel_tool_calls": not (body.tool_choice and body.tool_choice.disable_parallel_tool_use),
        "chat_template_kwargs": options,
        "reasoning_effort": output.effort if output else None,
    }
    if not isinstance(body, MessagesBody):
        return ChatBody(**prompt)
    schema = output.format.schema_ if output and output.format else None
    return ChatBody(
        **prompt,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_k=body.top_k,
        top_p=body.top_p,
        seed=body.seed,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        cache_salt=body.cache_salt,
        response_format=None
        if schema is None
        else ResponseFormat(type="json_schema", json_schema=JsonSchema(schema_=schema)),
    )


def _choice(body: PromptBody) -> Any:
    """Returns the chat's `tool_choice`."""
    match body.tool_choice:
        case OneChoice(name=name):
            return NamedTool(function=ToolName(name=name))
        case AnyChoice():
            return "required"
        case NoChoice():
            return "none"
        case _:
            return None


def _tool(fields: dict[str, Any], at: str) -> Tool:
    kind = fields.get("type")
    if kind is not None and kind != "custom":
        raise unsupported_type(at, kind, ": the server runs no tools; only 'custom' is supported")
    tool = to_struct(fields, CustomTool, CUSTOM_TOOL_OFF, at)
    function = ToolFunction(
        name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict
    )
    return Tool(function=function)
