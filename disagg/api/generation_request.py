"""Parses request bodies into `GenerationRequest`s, and splits these into requests to the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec

from disagg.api.body import check_number, decode_object, to_struct
from disagg.api.errors import ApiError, bad
from disagg.api.fields import COMPLETION_OFF, AnswerBody, ChatBody, CompletionBody
from disagg.api.model import ServedModel
from disagg.api.parsers.build import AnswerPlan
from disagg.api.structured import Wanted, has_grammar, wanted_grammar
from disagg.core.config.read import ApiConfig
from disagg.core.errors import InvalidRequestError
from disagg.core.sampling import check_sampling, sampling_of
from disagg.core.types import SamplingParams
from disagg.router.text import Decode

COMPLETION_TOKENS = 16
"""OpenAI's default of `max_tokens` for completions. The default for chat answers is the rest of the context."""
STOP_CHARACTERS = 256
SALT_CHARACTERS = 256
SESSION_CHARACTERS = 256
BIASES = 1024
PRIORITIES = 1 << 31
"""Priorities are signed integers of 32 bits."""


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One request to the engine: answers to one prompt, which share its KV."""

    first: int
    """Index of the first answer among all answers of the HTTP request."""
    prompt: Sequence[int]
    sampling: SamplingParams

    @property
    def answers(self) -> range:
        """Indexes of the answers."""
        return range(self.first, self.first + self.sampling.n)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """A checked HTTP request: `n` answers to each of `prompts` (tokens). Choice `p * n + i` is answer i to prompt p.

    The engine generates `made` answers per prompt: `n`, or `best_of` if set. The reply contains the best `n`.
    """

    prompts: tuple[Sequence[int], ...]
    n: int
    sampling: SamplingParams
    stream: bool
    usage: bool
    """Whether the stream ends with a chunk of token counts."""
    logprobs: bool = False
    """Whether the reply contains log-probabilities."""
    token_ids: bool = False
    """Whether log-probabilities name tokens by id instead of text."""
    returns_tokens: bool = False
    """Whether the reply contains the ids of prompt and answer tokens."""
    running_usage: bool = False
    """Whether each chunk of a stream contains the token counts so far."""
    cache_salt: str = ""
    """Salt of the prompts: only prompts with equal salts share cached KV."""
    session: str = ""
    """The client's name for the conversation; empty without one. Requests of a conversation use one decode group."""
    prompt_logprobs: int | None = None
    """Number of most probable tokens in the reply's `prompt_logprobs`; None: the reply has no such field."""
    echo: tuple[str, ...] = ()
    """Text of each prompt, with which the texts of its answers begin; empty without `echo`."""
    only_echo: bool = False
    """Whether the reply contains the prompts alone: the one token that the engine generates is left out."""
    priority: int = 0
    """Requests with a lower number are served first."""
    plan: AnswerPlan | None = None
    """Plan for the parser of each answer (reasoning, tool calls); None: answers are plain text."""
    decode: Decode | None = None
    """Decoder of the answers' tokens; None: the model's decoder, which omits special tokens."""

    @property
    def made(self) -> int:
        """Answers that the engine generates for each prompt."""
        return self.sampling.n

    @property
    def answers(self) -> int:
        """Answers that the engine generates for all prompts."""
        return len(self.prompts) * self.made

    @property
    def sequences(self) -> int:
        """Sequences that the engine computes for all prompts: answers, or beams."""
        return len(self.prompts) * self.sampling.sequences

    def parts(self, most: Callable[[int, int], int]) -> list[EngineRequest]:
        """Returns the requests to the engine.

        `most(prompt_tokens, max_tokens)` returns how many sequences the engine can compute at once. If a prompt needs
        more, each answer becomes a request of its own, with the same result. Raises a 400 for too many beams.
        """
        firsts = range(0, self.answers, self.made)
        parts = zip(firsts, self.prompts, strict=True)
        return [part for first, prompt in parts for part in self._parts_of(first, prompt, most)]

    def _parts_of(
        self, first: int, prompt: Sequence[int], most: Callable[[int, int], int]
    ) -> list[EngineRequest]:
        together = max(1, most(len(prompt), self.sampling.max_tokens))
        if self.sampling.beams > together:
            raise bad(
                "use_beam_search",
                f"use_beam_search with {self.sampling.beams} beams of up to {self.sampling.max_tokens} tokens "
                f"exceeds this server's limit of {together} beams",
            )
        if self.sampling.sequences <= together:
            return [EngineRequest(first, prompt, self.sampling)]
        each = (sampling_of(self.sampling, number) for number in range(self.made))
        return [
            EngineRequest(first + at, prompt, msgspec.structs.replace(one, n=1, prompt_logprobs=scored))
            for at, (one, scored) in enumerate(zip(each, self._scored(), strict=True))
        ]

    def _scored(self) -> list[int | None]:
        """Returns `prompt_logprobs` of each answer to a prompt: a whole reply needs those of one answer only."""
        count = self.sampling.prompt_logprobs
        return [count if self.stream or not number else None for number in range(self.made)]


async def parse_completion(raw: bytes, model: ServedModel, config: ApiConfig) -> GenerationRequest:
    """Parses a body of `/v1/completions`. Raises an `ApiError` if the body is invalid."""
    body = to_struct(decode_object(raw), CompletionBody, COMPLETION_OFF)
    check_model(body.model, model)
    check_limits(body, model, config)
    prompts = await _prompts(body.prompt, model, config)
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    only_echo = body.echo and max_tokens == 0
    request = make_request(body, prompts, "prompt", 1 if only_echo else max_tokens, body.logprobs, model)
    if has_grammar(body) and (wanted := await model.make_grammar(partial(wanted_grammar, body))):
        request = await with_grammar(request, wanted, model)
    echo = tuple(_texts(body.prompt, prompts, model)) if body.echo else ()
    return replace(request, token_ids=body.return_tokens_as_token_ids, echo=echo, only_echo=only_echo)


def _texts(prompt: str | list[Any], prompts: Sequence[Sequence[int]], model: ServedModel) -> Iterator[str]:
    """Yields the text of each prompt: as given, or the text of its tokens."""
    given = [prompt] if isinstance(prompt, str) else prompt
    for number, tokens in enumerate(prompts):
        yield given[number] if isinstance(given[number], str) else model.spell(tokens)


async def with_grammar(request: GenerationRequest, wanted: Wanted, model: ServedModel) -> GenerationRequest:
    """Returns the request with a grammar for its answers. Raises a 400 for an invalid grammar, or if other fields of
    the request cannot be combined with a grammar."""
    await model.check_grammar(wanted.grammar, wanted.param)
    sampling = msgspec.structs.replace(request.sampling, grammar=wanted.grammar)
    try:
        check_sampling(sampling, model.vocab_tokens)
    except InvalidRequestError as exc:
        raise bad(exc.param, str(exc)) from exc
    return replace(request, sampling=sampling)


def check_model(name: str | None, model: ServedModel) -> None:
    """Raises a 404 unless `name` is None or the served model's name."""
    if name is not None and name != model.name:
        raise ApiError(
            404,
            f"the model {name!r} is not served here; this server has {model.name!r}",
            param="model",
            code="model_not_found",
        )


async def _prompts(prompt: str | list[Any], model: ServedModel, config: ApiConfig) -> list[Sequence[int]]:
    if isinstance(prompt, str):
        return [await model.encode(prompt)]
    if not prompt or type(prompt[0]) is int:
        return [model.check_tokens(prompt, "prompt")]
    if len(prompt) > config.max_prompts:
        raise bad(
            "prompt",
            f"prompt has {len(prompt)} prompts; the limit per request is {config.max_prompts} (api.max_prompts)",
        )
    if all(isinstance(item, str) for item in prompt):
        return [await model.encode(item) for item in prompt]
    if all(isinstance(item, list) for item in prompt):
        return [model.check_tokens(item, f"prompt[{at}]") for at, item in enumerate(prompt)]
    raise bad(
        "prompt", "prompt must be a text, a list of texts, a list of tokens, or a list of lists of tokens"
    )


def check_limits(body: AnswerBody, model: ServedModel, config: ApiConfig) -> None:
    check_number("n", body.n, 1, config.max_n)
    if body.best_of is not None:
        check_number("best_of", body.best_of, body.n, config.max_n)
        if body.best_of > body.n and body.stream:
            raise bad(
                "best_of", "best_of above n cannot be streamed: the best answers are chosen only at the end"
            )
    if body.use_beam_search and body.stream:
        raise bad(
            "use_beam_search", "use_beam_search cannot be streamed: its answers are known only at the end"
        )
    for name, plain in (("length_penalty", 1.0), ("early_stopping", False)):
        if getattr(body, name) != plain and not body.use_beam_search:
            raise bad(name, f"{name} needs use_beam_search: true")
    if body.prompt_logprobs is not None and body.stream:
        raise bad(
            "prompt_logprobs", "prompt_logprobs cannot be streamed: use echo with logprobs, or no stream"
        )
    options = body.stream_options
    if options is not None and not body.stream:
        raise bad("stream_options", "stream_options needs stream: true")
    if options is not None and options.continuous_usage_stats and not options.include_usage:
        raise bad("stream_options", "stream_options.continuous_usage_stats needs include_usage: true")
    for name, values in (("stop", _stop(body)), ("stop_token_ids", body.stop_token_ids)):
        if len(values) > config.max_stop:
            raise bad(
                name, f"{name} has {len(values)} entries; the limit is {config.max_stop} (api.max_stop)"
            )
    if _stop(body):
        model.require_tokenizer("stop")
    if any(len(text) > STOP_CHARACTERS for text in _stop(body)):
        raise bad("stop", f"stop contains a text of more than {STOP_CHARACTERS} characters")
    check_number("priority", body.priority, -PRIORITIES, PRIORITIES - 1)
    if len(body.cache_salt) > SALT_CHARACTERS:
        raise bad("cache_salt", f"cache_salt has more than {SALT_CHARACTERS} characters")
    if len(body.prompt_cache_key or "") > SESSION_CHARACTERS:
        raise bad("prompt_cache_key", f"prompt_cache_key has more than {SESSION_CHARACTERS} characters")
    if len(body.logit_bias) > BIASES:
        raise bad("logit_bias", f"logit_bias has {len(body.logit_bias)} entries; the limit is {BIASES}")


def _stop(body: AnswerBody) -> tuple[str, ...]:
    return ((body.stop,) if body.stop else ()) if isinstance(body.stop, str) else tuple(body.stop)


def make_request(
    body: AnswerBody,
    prompts: Sequence[Sequence[int]],
    param: str,
    max_tokens: int,
    logprobs: int | None,
    model: ServedModel,
) -> GenerationRequest:
    for prompt in prompts:
        if not prompt:
            raise bad(param, f"{param} has no tokens: at least one is needed")
        if len(prompt) + max_tokens > model.context_tokens:
            raise bad(
                param,
                f"{len(prompt)} tokens in the prompt and up to {max_tokens} in the answer exceed the context of "
                f"{model.context_tokens} tokens: shorten the prompt or lower max_tokens",
                "context_length_exceeded",
            )
    sampling = _sampling(body, max_tokens, logprobs, model)
    usage = body.stream_options is not None and body.stream_options.include_usage
    return GenerationRequest(
        tuple(prompts),
        body.n,
        sampling,
        body.stream,
        usage,
        logprobs=logprobs is not None,
        prompt_logprobs=body.prompt_logprobs,
        returns_tokens=body.return_token_ids,
        running_usage=body.stream_options is not None and body.stream_options.continuous_usage_stats,
        decode=None if body.skip_special_tokens else model.whole_decode,
        cache_salt=body.cache_salt,
        session=body.prompt_cache_key or "",
        priority=body.priority,
    )


def _sampling(body: AnswerBody, max_tokens: int, logprobs: int | None, model: ServedModel) -> SamplingParams:
    beams = (body.best_of or body.n) if body.use_beam_search else 0
    made = body.n if beams else (body.best_of or body.n)
    if beams and logprobs is not None:
        raise bad("logprobs", "logprobs is not supported with use_beam_search")
    if made > body.n and logprobs is None:
        logprobs = 0  # log-probabilities of the chosen tokens, which rank the answers
    temperature = (0.0 if beams else 1.0) if body.temperature is None else body.temperature
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=0 if body.top_k == -1 else body.top_k,  # -1 means "off" in other servers
        top_p=body.top_p,
        seed=body.seed,
        stop=_stop(body),
        stop_token_ids=tuple(body.stop_token_ids),
        ignore_eos=body.ignore_eos,
        min_tokens=body.min_tokens,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_biases(body.logit_bias),
        logprobs=logprobs,
        prompt_logprobs=body.scored,
        n=made,
        beams=beams,
        length_penalty=body.length_penalty,
        early_stopping=body.early_stopping,
    )
    try:
        check_sampling(sampling, model.vocab_tokens)
    except InvalidRequestError as exc:
        param, message = exc.param, str(exc)
        if isinstance(body, ChatBody) and param == "logprobs":
            param, message = "top_logprobs", f"top_{message}"  # the field's name in a chat body
        raise bad(param, message) from exc
    return sampling


def _biases(given: dict[str, float]) -> tuple[tuple[int, float], ...]:
    for token in given:
        if not (token.isascii() and token.isdigit() and len(token) < 10):
            raise bad("logit_bias", f"logit_bias has the key {token!r}, which is not a token id")
    return tuple((int(token), bias) for token, bias in given.items())
