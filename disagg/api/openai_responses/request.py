"""Translates a body of `/v1/responses` to a chat request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from disagg.api.body import decode_object, to_struct
from disagg.api.chat_request import chat_generation, template_turn
from disagg.api.errors import ApiError, bad, unsupported_type
from disagg.api.fields import ChatBody, JsonSchema, NamedTool, ResponseFormat, Tool, ToolFunction, ToolName
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.openai_responses.conversation import messages_of
from disagg.api.openai_responses.echo import echo_of
from disagg.api.openai_responses.fields import (
    RESPONSES_OFF,
    STATELESS,
    TOOL_OFF,
    AnyJson,
    ChosenFunction,
    FunctionSpec,
    ResponsesBody,
    SchemaJson,
)
from disagg.core.config.read import ApiConfig

FIELD_NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "response_format": "text.format",
}
"""Names of chat fields in this API, for error messages."""


class ParsedResponses(NamedTuple):
    """A checked request."""

    echo: dict[str, msgspec.Raw]
    """Fields of the response that repeat the request, as JSON."""
    generation: GenerationRequest


async def parse_responses(raw: bytes, model: ServedModel, config: ApiConfig) -> ParsedResponses:
    """Parses a body of `/v1/responses`. Raises an `ApiError` if the body is invalid."""
    values = decode_object(raw)
    _check_stateless(values)
    body = to_struct(values, ResponsesBody, RESPONSES_OFF)
    functions = [_function(tool, f"tools[{number}].") for number, tool in enumerate(body.tools)]
    turns = [template_turn(message, "input.") for message in messages_of(body)]
    try:
        generation = await chat_generation(_chat_body(body, functions), turns, model, config)
    except ApiError as error:
        raise error.renamed(FIELD_NAMES) from error
    return ParsedResponses(echo_of(body, functions, generation.sampling), generation)


def _check_stateless(values: Mapping[str, Any]) -> None:
    for name, accepted in STATELESS.items():
        if values.get(name) is not None and values[name] not in accepted:
            raise bad(
                name,
                f"{name} is not supported: this server stores no responses. Send the whole conversation in input, "
                f"and wait for the reply or stream it",
                "unsupported_field",
            )


def _function(tool: dict[str, Any], at: str) -> FunctionSpec:
    kind = tool.get("type")
    if kind is not None and kind != "function":
        raise unsupported_type(at, kind, ": the server runs no tools; only 'function' is supported")
    return to_struct(tool, FunctionSpec, TOOL_OFF, at)


def _chat_body(body: ResponsesBody, functions: list[FunctionSpec]) -> ChatBody:
    choice = body.tool_choice
    return ChatBody(
        model=body.model,
        messages=[],
        max_completion_tokens=body.max_output_tokens,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        seed=body.seed,
        stream=body.stream,
        tools=[_tool(one) for one in functions],
        tool_choice=NamedTool(function=ToolName(name=choice.name))
        if isinstance(choice, ChosenFunction)
        else choice,
        parallel_tool_calls=body.parallel_tool_calls,
        reasoning_effort=body.reasoning.effort if body.reasoning else None,
        response_format=_response_format(body),
        prompt_cache_key=body.prompt_cache_key,
        cache_salt=body.cache_salt,
        chat_template_kwargs=body.chat_template_kwargs,
    )


def _tool(spec: FunctionSpec) -> Tool:
    function = ToolFunction(
        name=spec.name, description=spec.description, parameters=spec.parameters, strict=spec.strict
    )
    return Tool(function=function)


def _response_format(body: ResponsesBody) -> ResponseFormat | None:
    match body.text.format if body.text else None:
        case SchemaJson(schema_=schema):
            return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema_=schema))
        case AnyJson():
            return ResponseFormat(type="json_object")
        case _:
            return None
