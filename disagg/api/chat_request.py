"""Parses chat requests: messages, tools, and the options of the checkpoint's chat template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, get_args

import msgspec

from disagg.api.answer_grammar import answer_grammar, calls_grammar
from disagg.api.body import decode_object, to_struct
from disagg.api.errors import bad
from disagg.api.fields import (
    CHAT_OFF,
    MESSAGE_OFF,
    ChatBody,
    NamedTool,
    PromptMessage,
    RequestedCall,
    TokenizeBody,
    Tool,
)
from disagg.api.generation_request import (
    GenerationRequest,
    check_limits,
    check_model,
    make_request,
    with_grammar,
)
from disagg.api.model import Rendered, ServedModel
from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.texts import load_json
from disagg.api.structured import Wanted, has_grammar, wanted_grammar
from disagg.core.config.api import ToolParserName
from disagg.core.config.read import ApiConfig

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
}
"""Accepted roles, and their names in chat templates: `developer` is OpenAI's newer name of `system`."""


class ChatPrompt(NamedTuple):
    """The prompt of a chat request, and the tools that the answer may call, in the form of chat templates."""

    rendered: Rendered
    tools: list[dict[str, Any]]


async def parse_chat(raw: bytes, model: ServedModel, config: ApiConfig) -> GenerationRequest:
    """Parses a body of `/v1/chat/completions`. Raises an `ApiError` if the body is invalid."""
    body = to_struct(decode_object(raw), ChatBody, CHAT_OFF)
    if body.top_logprobs is not None and not body.logprobs:
        raise bad("top_logprobs", "top_logprobs needs logprobs: true")
    return await chat_generation(body, conversation(body.messages), model, config)


async def chat_generation(
    body: ChatBody, turns: list[dict[str, Any]], model: ServedModel, config: ApiConfig
) -> GenerationRequest:
    """Returns the request for the next message of a conversation. Raises an `ApiError`.

    `turns`: the messages in the form of chat templates; `body.messages` is not read.
    """
    check_model(body.model, model)
    check_limits(body, model, config)
    rendered, tools = await chat_prompt(body, turns, model)
    given = [limit for limit in (body.max_completion_tokens, body.max_tokens) if limit is not None]
    max_tokens = given[0] if given else max(1, model.context_tokens - len(rendered.tokens))
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    request = make_request(body, [rendered.tokens], "messages", max_tokens, logprobs, model)
    plan = AnswerPlan(
        model.parsers, tools, _forced(body), rendered.thinking, parallel=body.parallel_tool_calls
    )
    makes = has_grammar(body) or plan.forced is not None
    if makes and (wanted := await model.make_grammar(partial(_grammar, body, plan, model))):
        plan = replace(plan, constrained=True)
        if tools:
            # The grammar of the content is checked alone first, so that an error of it names the content's field.
            await model.check_grammar(wanted.grammar, wanted.param)
            wanted = wanted._replace(param="tools")
        whole = partial(answer_grammar, plan, wanted.grammar, model.marker)
        grammar = await model.make_grammar(whole) if tools else whole()  # only schemas of tools take long
        request = await with_grammar(request, wanted._replace(grammar=grammar), model)
    return replace(request, plan=plan, decode=request.decode or model.chat_decode) if plan.parses else request


async def chat_prompt(body: ChatBody, turns: list[dict[str, Any]], model: ServedModel) -> ChatPrompt:
    """Renders a conversation for its next message. Raises a 400 for invalid tools or options of the template."""
    tools = _tools(body)
    if _forced(body) is None:  # required calls have the same syntax for all models
        _require_tool_parser(tools, model)
    return ChatPrompt(await model.render(turns, template_options(body, tools)), tools)


def _grammar(body: ChatBody, plan: AnswerPlan, model: ServedModel) -> Wanted | None:
    """Returns the grammar of the content, or of required calls; None for unconstrained answers. Raises a 400."""
    wanted = wanted_grammar(body)
    if plan.forced is not None:
        # The answer has no content: a `response_format` applies to later answers of the conversation.
        if wanted is not None and wanted.param != "response_format":
            raise bad(
                wanted.param, f"{wanted.param} cannot be combined with a tool_choice that requires a call"
            )
        if body.use_beam_search:
            raise bad(
                "use_beam_search", "use_beam_search does not support a tool_choice that requires a call"
            )
        wanted = Wanted("tools", calls_grammar(plan))
    if wanted is None:
        return None
    if plan.unruled:
        raise bad(
            wanted.param,
            f"{wanted.param} cannot be combined with tools for this model, whose calls begin as JSON does "
            f"(api.tool_parser = {model.parsers.tools}): set tool_choice to 'none' or 'required'",
        )
    model.require_tokenizer(wanted.param)
    return wanted


def _forced(body: ChatBody) -> str | None:
    """Returns the name of the tool that the answer must call: empty for any tool, None if no call is required."""
    if isinstance(body.tool_choice, NamedTool):
        return body.tool_choice.function.name
    return "" if body.tool_choice == "required" else None


def template_options(body: ChatBody | TokenizeBody, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the chat template's variables besides the messages. Raises a 400 for a reserved name."""
    options = dict(body.chat_template_kwargs)
    for name in options:
        if name in RESERVED:
            raise bad(
                "chat_template_kwargs",
                f"chat_template_kwargs.{name} is not allowed; the server sets {name} itself",
            )
    if body.reasoning_effort is not None:
        options.setdefault("reasoning_effort", body.reasoning_effort)
        if body.reasoning_effort == "none":  # this variable turns off the reasoning of Qwen 3 and others
            options.setdefault("enable_thinking", False)
    return options | ({"tools": list(tools)} if tools else {})


RESERVED = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Arguments of `apply_chat_template` that a client must not set. Only the checkpoint provides the template."""


def conversation(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Converts messages for chat templates; text parts of one message are joined by line breaks. Raises a 400."""
    if not messages:
        raise bad("messages", "messages is empty")
    return [_turn(fields, f"messages[{number}].") for number, fields in enumerate(messages)]


def _turn(fields: dict[str, Any], at: str) -> dict[str, Any]:
    return template_turn(to_struct(fields, PromptMessage, MESSAGE_OFF, at), at)


def template_turn(message: PromptMessage, at: str) -> dict[str, Any]:
    """Converts one message for the chat template. Raises a 400; `at`: path of the message in the body."""
    if message.role not in ROLES:
        raise bad(f"{at}role", f"{at}role = {message.role!r} is not supported; roles are {', '.join(ROLES)}")
    _require_role(message, at)
    content = message.content or ""
    text = content if isinstance(content, str) else "\n".join(part.text for part in content)
    turn: dict[str, Any] = {"role": ROLES[message.role], "content": text}
    if message.name:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        turn["tool_calls"] = [
            _requested(one, f"{at}tool_calls[{i}].") for i, one in enumerate(message.tool_calls)
        ]
    reasoning = message.reasoning_content or message.reasoning
    if reasoning:
        turn["reasoning_content"] = reasoning
        if not text:
            turn["thinking"] = (
                reasoning  # with tool calls, gpt-oss's template takes either `thinking` or content
            )
    return turn


def _require_role(message: PromptMessage, at: str) -> None:
    """Raises a 400 if the message has a field that its role does not allow, or lacks required content."""
    assistant = message.role == "assistant"
    if message.content is None and not assistant:
        raise bad(f"{at}content", f"{at}content is missing")
    fields = {
        "tool_calls": not message.tool_calls or assistant,
        "tool_call_id": message.tool_call_id is None or message.role == "tool",
        "reasoning_content": not message.reasoning_content or assistant,
        "reasoning": not message.reasoning or assistant,
    }
    for name, allowed in fields.items():
        if not allowed:
            raise bad(f"{at}{name}", f"{at}{name} is not supported in a message of role {message.role!r}")


def _requested(call: RequestedCall, at: str) -> dict[str, Any]:
    """Converts a tool call in an earlier message for the chat template. The arguments become an object, which
    templates print as JSON."""
    arguments = call_arguments(call.function.arguments, f"{at}function.arguments")
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


def call_arguments(text: str, path: str) -> Any:
    """Returns the value of a call's arguments, a JSON text. Raises a 400 that names `path`."""
    try:
        return load_json(text or "{}")
    except ValueError as exc:
        raise bad(path, f"{path} is not JSON: {exc}") from exc


def _tools(body: ChatBody) -> list[dict[str, Any]]:
    """Returns the tools that the answer may call, in the form of chat templates. Raises a 400."""
    chosen = body.tool_choice
    if chosen is not None and chosen != "none" and not body.tools:
        if chosen == "auto":
            return []
        raise bad("tool_choice", "tool_choice needs tools")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise bad("tools", "tools contains two functions with the same name")
    if isinstance(chosen, NamedTool) and chosen.function.name not in names:
        raise bad("tool_choice", f"tool_choice names {chosen.function.name!r}, which tools does not contain")
    return [] if chosen == "none" else plain_tools(body.tools)


def plain_tools(tools: Sequence[Tool]) -> list[dict[str, Any]]:
    """Returns the tools as plain dictionaries for chat templates."""
    plain: list[dict[str, Any]] = msgspec.to_builtins(tools)
    return plain


def _require_tool_parser(tools: Sequence[object], model: ServedModel) -> None:
    if tools and model.parsers.tools == "none":
        names = [name for name in get_args(ToolParserName) if name not in ("auto", "none")]
        raise bad(
            "tools",
            f"tools is not supported: the chat template of {model.name} contains no known tool-call syntax. "
            f"Restart the server with api.tool_parser set to one of {', '.join(names)}",
            "no_tool_parser",
        )
