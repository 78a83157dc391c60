"""Structs of bodies of `POST /v1/responses`, with the field names and defaults of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from disagg.api.fields import Body


class ReasoningOptions(Body, frozen=True, kw_only=True):
    """The field `reasoning`."""

    effort: str | None = None
    summary: Literal["auto"] | None = None
    """Accepted without effect: replies contain the whole reasoning and no summary."""


class TextOnly(Body, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """Format of unconstrained answers."""


class AnyJson(Body, frozen=True, kw_only=True, tag_field="type", tag="json_object"):
    """Format of answers that are a JSON object."""


class SchemaJson(Body, frozen=True, kw_only=True, tag_field="type", tag="json_schema"):
    """Format of answers that follow a JSON schema."""

    schema_: dict[str, Any] = msgspec.field(name="schema")
    name: str = ""
    description: str | None = None
    strict: bool | None = None
    """Accepted without effect: answers always follow the schema."""


class TextOptions(Body, frozen=True, kw_only=True):
    """The field `text`."""

    format: TextOnly | AnyJson | SchemaJson | None = None
    verbosity: Literal["medium"] | None = None


class FunctionSpec(Body, frozen=True, kw_only=True):
    """A function of `tools`."""

    type: Literal["function"]
    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ChosenFunction(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """Value of `tool_choice` that names a function."""

    name: str


class ResponsesStreamOptions(Body, frozen=True, kw_only=True):
    """The field `stream_options`."""

    include_obfuscation: Literal[False] | None = None
    include_usage: bool = True
    """Accepted without effect: the last event always has `usage`. Load generators send this field of chat."""


class ResponsesBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/responses`. The last group of fields extends OpenAI's API."""

    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float = 1.0
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions | None = None
    text: TextOptions | None = None
    include: list[Literal["reasoning.encrypted_content"]] = msgspec.field(default_factory=list)
    """Accepted without effect: `encrypted_content` is null, because replies contain the reasoning as text."""
    metadata: dict[str, str] = msgspec.field(default_factory=dict)
    prompt_cache_key: str | None = None
    user: str | None = None
    safety_identifier: str | None = None

    seed: int | None = None
    top_k: int = 0
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str = ""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Variables of the chat template."""


class MessageItem(Body, frozen=True, kw_only=True):
    """A message in `input`."""

    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[dict[str, Any]]
    type: str = "message"
    id: str | None = None
    status: str | None = None
    phase: str | None = None
    """Accepted without effect: chat templates have no such label."""


class CallItem(Body, frozen=True, kw_only=True):
    """An earlier call in `input`."""

    type: str
    call_id: str
    name: str
    arguments: str = ""
    id: str | None = None
    status: str | None = None


class CallOutputItem(Body, frozen=True, kw_only=True):
    """The result of an earlier call in `input`."""

    type: str
    call_id: str
    output: str | list[dict[str, Any]]
    name: str | None = None
    id: str | None = None
    status: str | None = None


class ReasoningText(Body, frozen=True, kw_only=True, tag_field="type", tag="reasoning_text"):
    """A part of earlier reasoning."""

    text: str


class ReasoningItem(Body, frozen=True, kw_only=True):
    """Earlier reasoning in `input`."""

    type: str
    content: list[ReasoningText] = msgspec.field(default_factory=list)
    summary: list[dict[str, Any]] = msgspec.field(default_factory=list)
    """Accepted without effect: `content` has the reasoning itself."""
    id: str | None = None
    status: str | None = None


class TextPart(Body, frozen=True, kw_only=True):
    """A text in a message or in the result of a call."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = msgspec.field(default_factory=list)
    logprobs: list[Any] | None = None


STATELESS: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "previous_response_id": (),
    "prompt": (),
    "store": (False,),
}
"""Fields that need stored responses, and their accepted values."""

RESPONSES_OFF: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "context_management": ([],),
    "image": (),
    "max_tool_calls": (),
    "moderation": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "service_tier": ("auto", "default"),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    **STATELESS,
}
"""Unsupported fields of OpenAI's API, and their accepted values."""

ITEM_OFF: dict[str, tuple[Any, ...]] = {
    "async": (False,),
    "caller": ({"type": "direct"},),
    "encrypted_content": (),
    "namespace": (),
}
"""Unsupported fields of input items, and their accepted values."""

TOOL_OFF: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "async": (False,),
    "defer_loading": (False,),
    "output_schema": (),
}
"""Unsupported fields of functions, and their accepted values."""
