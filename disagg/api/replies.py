"""Reply bodies in OpenAI's format, as msgspec structs for fast encoding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType


class PromptDetails(msgspec.Struct, frozen=True):
    """Prompt tokens whose KV was cached."""

    cached_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """Token counts of a request; each prompt counts once, however many answers it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct, frozen=True):
    """One of the most probable tokens at a position."""

    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(msgspec.Struct, frozen=True):
    """Log-probabilities of one token of a chat answer."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """The field `choices[].logprobs` of chat completions."""

    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(msgspec.Struct, frozen=True):
    """The field `choices[].logprobs` of completions: parallel lists. An echoed first token has nulls."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(msgspec.Struct, frozen=True):
    """Value of a token in an entry of `prompt_logprobs`, as in vLLM. The most probable token has rank 1."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""The field `prompt_logprobs`, as in vLLM: for each prompt token values by token id; null for the first token."""


class Function(msgspec.Struct, omit_defaults=True):
    """Name and arguments (a JSON text) of a tool call. A chunk contains only their new parts."""

    name: str | None = None
    arguments: str | None = None


class ToolCall(msgspec.Struct):
    """A tool call in the message of a whole chat answer."""

    id: str
    function: Function
    type: str = "function"


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool call, or further text of its arguments, in a chunk. `id` and `type` come with the first part."""

    index: int
    function: Function
    id: str | None = None
    type: str | None = None


class ChatMessage(msgspec.Struct, frozen=True):
    """The message of a whole chat answer. `content` is null if the answer has calls but no content."""

    content: str | None
    role: str = "assistant"
    refusal: None = None
    tool_calls: list[ToolCall] | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """Copy of `reasoning_content`, for clients that read this field."""


class Delta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The new content in a chunk of a chat answer."""

    role: str | None = None
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Copy of `reasoning_content`, for clients that read this field."""
    tool_calls: list[ToolCallDelta] | None = None


class ChatChoice(msgspec.Struct, frozen=True):
    """A whole chat answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    token_ids: Sequence[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A chat answer's part in one chunk of a stream."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, frozen=True):
    """A whole completion, or its part in one chunk of a stream."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: Sequence[int] | UnsetType = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET


class ReplyEnvelope(msgspec.Struct, frozen=True):
    """Common fields of all replies. Chunks have `usage` only if requested: the counts in the last chunk, or in all
    chunks with `continuous_usage_stats`, else null."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[int] | UnsetType = UNSET
    """Prompt tokens of a chat request with `return_token_ids`; in a stream, only in the first chunk."""
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET
    """Of a chat request with `prompt_logprobs`."""
