"""Structs of request bodies, with the field names and defaults of OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from disagg.core.config.groups import Role
from disagg.core.profile.types import LimitS, ProfileOptions, ProfileRequest, Steps


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of request bodies; unknown fields are rejected."""


class StreamOptions(Body, frozen=True, kw_only=True):
    """The field `stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    """Whether each chunk contains the token counts so far; needs `include_usage`."""


class JsonSchema(Body, frozen=True, kw_only=True):
    """The field `response_format.json_schema`."""

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = msgspec.field(default=None, name="schema")
    strict: bool | None = None
    """Accepted without effect: answers always follow the schema."""


class ResponseFormat(Body, frozen=True, kw_only=True):
    """The field `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Body, frozen=True, kw_only=True):
    """The field `structured_outputs`, as in vLLM: one of a JSON schema, a regular expression, texts, or a grammar."""

    json: dict[str, Any] | str | None = None
    json_object: bool = False
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    """Grammar in llguidance's Lark dialect, or in GBNF."""


class AnswerBody(Body, frozen=True, kw_only=True):
    """Fields of completions and chat completions. The last group of fields extends OpenAI's API, as in vLLM."""

    model: str
    max_tokens: int | None = None
    temperature: float | None = None
    """Sampling temperature; by default 1, or 0 for a beam search."""
    top_p: float = 1.0
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = ""
    logit_bias: dict[str, float] = {}
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    top_k: int = 0
    min_p: float = 0.0
    min_tokens: int = 0
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    repetition_penalty: float = 1.0
    cache_salt: str = ""
    priority: int = 0
    """Requests with a lower number are served first."""
    skip_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: int | None = None
    """Number of most probable tokens to return at each position of the prompt, with the prompt's own token."""
    best_of: int | None = None
    """Number of answers to generate, of which the best `n` are returned; for a beam search, the number of beams."""
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    @property
    def scored(self) -> int | None:
        """Value of `SamplingParams.prompt_logprobs`."""
        return self.prompt_logprobs


class CompletionBody(AnswerBody, frozen=True, kw_only=True):
    """Body of `POST /v1/completions`. `prompt`: a text, texts, tokens, or lists of tokens."""

    prompt: str | list[Any]
    logprobs: int | None = None
    return_tokens_as_token_ids: bool = False
    """Whether `logprobs` names tokens as `token_id:ID`, as in vLLM: different tokens may have the same text."""
    echo: bool = False
    """Whether the text begins with the prompt, and `logprobs` with the prompt's tokens."""

    @property
    def scored(self) -> int | None:
        """Value of `SamplingParams.prompt_logprobs`, as large as `prompt_logprobs` and `echo` need."""
        counts = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in counts if count is not None), default=None)


class ToolFunction(Body, frozen=True, kw_only=True, omit_defaults=True):
    """The function of a tool. `parameters`: JSON schema of the arguments."""

    name: Annotated[str, msgspec.Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A tool that answers may call."""

    function: ToolFunction


class ToolName(Body, frozen=True, kw_only=True):
    """Name of a tool."""

    name: str


class NamedTool(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """Value of `tool_choice` that names a tool."""

    function: ToolName


class ChatBody(AnswerBody, frozen=True, kw_only=True):
    """Body of `POST /v1/chat/completions`."""

    messages: list[dict[str, Any]]
    tools: list[Tool] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, as in vLLM."""
    reasoning_effort: str | None = None
    max_completion_tokens: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None


class ContentPart(Body, frozen=True, kw_only=True, tag_field="type", tag="text"):
    """A part of a message's content; only text is supported."""

    text: str


class CalledFunction(Body, frozen=True, kw_only=True):
    """Name and arguments (a JSON text) of an earlier call."""

    name: str
    arguments: str = ""
    parsed_arguments: Any = None
    """Accepted without effect: the client `openai` adds it in `parse()`, and sends it back."""


class RequestedCall(Body, frozen=True, kw_only=True, tag_field="type", tag="function"):
    """A call in an earlier message of the assistant."""

    function: CalledFunction
    id: str = ""
    index: int | None = None


class PromptMessage(Body, frozen=True, kw_only=True):
    """One turn of a conversation."""

    role: str
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[RequestedCall] = []
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """Another name of `reasoning_content`."""
    parsed: Any = None
    """Accepted without effect: the client `openai` adds it in `parse()`, and sends it back."""


class TokenizeBody(Body, frozen=True, kw_only=True):
    """Body of `POST /tokenize`: a text or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    tools: list[Tool] = []
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, as in vLLM."""
    reasoning_effort: str | None = None


class DetokenizeBody(Body, frozen=True, kw_only=True):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


OFF: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "reasoning_effort": ("none",),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "web_search_options": (),
}
"""Unsupported fields of OpenAI's API. A field is ignored if null or one of the listed values, else rejected."""

COMPLETION_OFF = {
    name: values for name, values in OFF.items() if name not in CompletionBody.__struct_fields__
}
"""Unsupported fields of completions."""

CHAT_OFF = {name: values for name, values in OFF.items() if name not in ChatBody.__struct_fields__}
"""Unsupported fields of chat requests."""

MESSAGE_OFF: dict[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "refusal": ("",),
}
"""Unsupported fields of messages, and their accepted values: clients send earlier replies back unchanged."""


class ProfileBody(Body, frozen=True, kw_only=True):
    """Body of `/profile`. See `disagg.core.profile.types`."""

    role: Role | None = None
    group: str | None = None
    rank: int = 0
    steps: Steps = 100
    limit_s: LimitS = 60.0

    def request(self) -> ProfileRequest:
        """Returns the request to the router."""
        return ProfileRequest(ProfileOptions(self.steps, self.limit_s), self.role, self.group, self.rank)
