"""Structs of bodies of `POST /v1/messages`, with the field names and defaults of Anthropic's API.

`cache_control` is accepted everywhere without effect: the server caches the KV of all prompts.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from disagg.api.fields import Body


class ToolChoiceBody(Body, frozen=True, kw_only=True, tag_field="type"):
    """Base of the values of `tool_choice`."""

    disable_parallel_tool_use: bool = False


class AutoChoice(ToolChoiceBody, frozen=True, kw_only=True, tag="auto"):
    """The model decides about calls."""


class AnyChoice(ToolChoiceBody, frozen=True, kw_only=True, tag="any"):
    """The answer must call a tool."""


class OneChoice(ToolChoiceBody, frozen=True, kw_only=True, tag="tool"):
    """The answer must call the tool `name`."""

    name: str


class NoChoice(ToolChoiceBody, frozen=True, kw_only=True, tag="none"):
    """The answer may not call a tool."""


ThinkingDisplay = Literal["summarized", "omitted"]
"""`summarized`: blocks contain the whole reasoning. `omitted`: blocks of reasoning are empty."""


class ThinkingOn(Body, frozen=True, kw_only=True, tag_field="type", tag="enabled"):
    """Value of `thinking` that turns reasoning on."""

    budget_tokens: int
    """Accepted without effect: only `max_tokens` limits the reasoning."""
    display: ThinkingDisplay | None = None


class ThinkingAdaptive(Body, frozen=True, kw_only=True, tag_field="type", tag="adaptive"):
    """Value of `thinking` that turns reasoning on, without a budget."""

    display: ThinkingDisplay | None = None


class ThinkingOff(Body, frozen=True, kw_only=True, tag_field="type", tag="disabled"):
    """Value of `thinking` that turns reasoning off."""


class SchemaFormat(Body, frozen=True, kw_only=True):
    """The field `output_config.format`."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = msgspec.field(name="schema")


class OutputOptions(Body, frozen=True, kw_only=True):
    """The field `output_config`."""

    effort: str | None = None
    format: SchemaFormat | None = None


class RequestMetadata(Body, frozen=True, kw_only=True):
    """The field `metadata`, which has no effect."""

    user_id: str | None = None


class PromptBody(Body, frozen=True, kw_only=True):
    """Body of `POST /v1/messages/count_tokens`. `chat_template_kwargs` extends Anthropic's API."""

    model: str
    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = msgspec.field(default_factory=list)
    tool_choice: AutoChoice | AnyChoice | OneChoice | NoChoice | None = None
    thinking: ThinkingOn | ThinkingAdaptive | ThinkingOff | None = None
    output_config: OutputOptions | None = None
    cache_control: Any = None
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Variables of the chat template."""


class MessagesBody(PromptBody, frozen=True, kw_only=True):
    """Body of `POST /v1/messages`. The last group of fields extends Anthropic's API."""

    max_tokens: int
    stop_sequences: list[str] = msgspec.field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    metadata: RequestMetadata | None = None
    service_tier: Literal["auto", "standard_only"] | None = None
    thread: dict[str, Any] | None = None
    """Always refused, with a code that the client understands: the server stores no conversations."""

    seed: int | None = None
    ignore_eos: bool = False
    min_tokens: int = 0
    cache_salt: str = ""


class CustomTool(Body, frozen=True, kw_only=True):
    """A tool that answers may call."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    input_schema: dict[str, Any]
    type: str = "custom"
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: bool | None = None
    """Accepted without effect."""


class MessageTurn(Body, frozen=True, kw_only=True):
    """A message of the conversation."""

    role: Literal["user", "assistant"]
    content: str | list[dict[str, Any]]


class TextBlock(Body, frozen=True, kw_only=True):
    """A text in a message, in the system prompt or in the result of a call."""

    type: str
    text: str
    cache_control: Any = None


class ThinkingBlock(Body, frozen=True, kw_only=True):
    """Earlier reasoning. The signature is not checked."""

    type: str
    thinking: str
    signature: str = ""


class ToolUseBlock(Body, frozen=True, kw_only=True):
    """An earlier call."""

    type: str
    id: str
    name: str
    input: dict[str, Any]
    cache_control: Any = None


class ToolResultBlock(Body, frozen=True, kw_only=True):
    """The result of an earlier call."""

    type: str
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    """Accepted without effect: chat templates have no such field."""
    cache_control: Any = None


MESSAGES_OFF: dict[str, tuple[Any, ...]] = {
    "container": (),
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "inference_geo": (),
    "mcp_servers": ([],),
}
"""Unsupported fields of Anthropic's API, and their accepted values."""

BLOCK_OFF: dict[str, tuple[Any, ...]] = {
    "caller": ({"type": "direct"},),
    "citations": ([],),
    "toolset_name": (),
}
"""Unsupported fields of blocks, and their accepted values: clients send earlier replies back unchanged."""

CUSTOM_TOOL_OFF: dict[str, tuple[Any, ...]] = {
    "allowed_callers": (["direct"],),
    "defer_loading": (False,),
    "input_examples": ([],),
}
"""Unsupported fields of tools, and their accepted values."""
