"""Converts outputs of the router to a whole reply or to the chunks of a stream."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from disagg.api import replies as r
from disagg.api.errors import ApiError
from disagg.api.generation_request import GenerationRequest
from disagg.api.logprobs import Speller, finite
from disagg.api.model import ServedModel
from disagg.core.types import TokenLogprobs
from disagg.router.answers import Output

DONE = b"data: [DONE]\n\n"
POSITIONS = 256
"""Positions of a prompt whose log-probabilities are prepared in one go, in about 5 ms with 20 tokens each."""
_ENCODER = msgspec.json.Encoder()


def event(value: object) -> bytes:
    """Returns a server-sent event with `value` as JSON."""
    return b"data: " + _ENCODER.encode(value) + b"\n\n"


def named_event(kind: str, **fields: object) -> bytes:
    """Returns a server-sent event with a name, which the field `type` of its JSON repeats."""
    return b"event: " + kind.encode() + b"\n" + event({"type": kind, **fields})


class AnswerWriter(ABC):
    """Contract of the reply formats: collects one request's answers (`add`, then `whole`), or turns them into events
    (`chunk`, then `tail` or `failed`)."""

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        """`request_id` becomes the reply's id."""
        self._request, self._model = request, model
        self._id = request_id
        self._created_s = int(time.time())
        self.completion_tokens = 0
        self._cached_tokens: int | None = None

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts, each counted once."""
        return sum(len(prompt) for prompt in self._request.prompts)

    def _count(self, index: int, output: Output) -> None:
        """Counts the tokens of an output. Cached prompt tokens are counted only for the first answer to a prompt."""
        self.completion_tokens += len(output.tokens)
        if output.cached_tokens is not None and output.index == 0 and index % self._request.made == 0:
            self._cached_tokens = (self._cached_tokens or 0) + output.cached_tokens

    @abstractmethod
    def add(self, index: int, output: Output) -> None:
        """Adds an output to the whole reply."""

    async def prepare(self) -> None:
        """Prepares `whole`, in parts if this takes long: other tasks run meanwhile. Does nothing by default."""
        return

    @abstractmethod
    def whole(self) -> bytes:
        """Returns the reply's JSON, after `prepare`."""

    @abstractmethod
    def chunk(self, index: int, output: Output) -> bytes:
        """Returns the events of an output, in order."""

    @abstractmethod
    def tail(self) -> list[bytes]:
        """Returns the last events of a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> bytes:
        """Returns the last event of a stream that `error` ends."""


class Writer(AnswerWriter):
    """Base of the writers of completions and chat completions: replies with choices."""

    kind: str
    chunk_kind: str

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        super().__init__(request, model, request_id)
        self._speller = Speller(model)
        self._texts = [""] * request.answers
        self._finish: list[str | None] = [None] * request.answers
        self._logprobs: list[list[TokenLogprobs]] = [[] for _ in range(request.answers)]
        self._scores: list[Sequence[TokenLogprobs]] = [()] * len(request.prompts)
        """Log-probabilities of each prompt's tokens, from its second token on."""
        self._entries: dict[int, r.PromptLogprobs] = {}
        """The field `prompt_logprobs` of each prompt, by its number, if the request has the field."""
        self._tokens: list[list[int]] = [[] for _ in range(request.answers)]
        """Tokens of each answer, if the whole reply contains them."""
        self._started = False
        """Whether the stream has begun with an event."""
        self._only_text = not (request.running_usage or request.returns_tokens)
        """Whether the middle chunks of a stream differ only in their text."""
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        """Constant bytes before and after the text of an event, by choice; set by the choice's first event."""

    def add(self, index: int, output: Output) -> None:
        self._count(index, output)
        if self._request.returns_tokens:
            self._tokens[index].extend(output.tokens)
        self._texts[index] += output.text
        self._finish[index] = output.finish
        self._logprobs[index].extend(output.logprobs)

    def whole(self) -> bytes:
        choices = [self._choice(choice, answer) for choice, answer in enumerate(self._best())]
        return _ENCODER.encode(
            r.ReplyEnvelope(
                self._id,
                self.kind,
                self._created_s,
                self._model.name,
                choices,
                self._usage(),
                self._common_prompt(),
                self._common_scores(),
            )
        )

    def _count(self, index: int, output: Output) -> None:
        super()._count(index, output)
        if output.prompt_logprobs:
            self._scores[index // self._request.made] = output.prompt_logprobs

    def _common_prompt(self) -> Sequence[int] | UnsetType:
        """Returns the prompt's tokens if the reply contains them at its top level, outside of the choices."""
        return UNSET

    def _common_scores(self) -> r.PromptLogprobs | UnsetType:
        """Returns the prompt's log-probabilities if the reply contains them at its top level."""
        return UNSET

    async def prepare(self) -> None:
        """See `AnswerWriter.prepare`: makes `prompt_logprobs`, which has many entries for a long prompt."""
        count = self._request.prompt_logprobs
        if count is None:
            return
        for prompt, scores in enumerate(self._scores):
            self._entries[prompt] = [None]  # nothing precedes the first token
            for at in range(0, len(scores), POSITIONS):
                self._entries[prompt] += self._speller.prompt(scores[at : at + POSITIONS], count)
                await asyncio.sleep(0)

    def _prompt_logprobs(self, prompt: int) -> r.PromptLogprobs | UnsetType:
        """Returns the field `prompt_logprobs` of a prompt, given by its number, if the request has the field."""
        return self._entries.get(prompt, UNSET)

    def _best(self) -> list[int]:
        """Returns the `n` answers of each prompt with the highest mean log-probability, best first.

        Returns all answers in order if `best_of` is not above `n`.
        """
        n, made = self._request.n, self._request.made
        if n == made:
            return list(range(self._request.answers))
        firsts = range(0, self._request.answers, made)
        return [one for at in firsts for one in sorted(range(at, at + made), key=self._unlikely)[:n]]

    def _unlikely(self, answer: int) -> float:
        logprobs = [one.logprob for one in self._logprobs[answer]]
        return -sum(logprobs) / max(1, len(logprobs))

    def chunk(self, index: int, output: Output) -> bytes:
        self._count(index, output)
        template = self._templates.get(index)
        if template is not None and output.finish is None and not output.logprobs:
            return template[0] + _ENCODER.encode(output.text) + template[1] if output.text else b""
        pieces = self._pieces(index, output)
        if template is None and self._only_text:
            self._templates[index] = self._template(index)
        return b"".join(self._event([piece]) for piece in pieces)

    def _template(self, index: int) -> tuple[bytes, bytes]:
        choice = _ENCODER.encode(self._plain(index, "\0"))
        event = self._event([msgspec.Raw(choice)])
        # JSON escapes quotation marks within strings, so the choice and its text each occur only once.
        before, _, after = event.partition(choice)
        head, _, tail = choice.partition(_ENCODER.encode("\0"))
        return before + head, tail + after

    def tail(self) -> list[bytes]:
        """See `AnswerWriter.tail`: usage if requested, and `[DONE]`."""
        return ([self._event([], self._usage())] if self._request.usage else []) + [DONE]

    def failed(self, error: ApiError) -> bytes:
        return b"data: " + error.body() + b"\n\n"

    def _event(self, choices: Sequence[object], usage: r.Usage | None = None) -> bytes:
        if self._request.running_usage:
            usage = self._usage()
        usage_or_unset = usage if self._request.usage else UNSET
        prompt = UNSET if self._started else self._common_prompt()
        self._started = True
        reply = r.ReplyEnvelope(
            self._id,
            self.chunk_kind,
            self._created_s,
            self._model.name,
            list(choices),
            usage_or_unset,
            prompt,
        )
        return event(reply)

    def _usage(self) -> r.Usage:
        prompt, completion = self.prompt_tokens, self.completion_tokens
        cached = UNSET if self._cached_tokens is None else r.PromptDetails(self._cached_tokens)
        return r.Usage(prompt, completion, prompt + completion, cached)

    @abstractmethod
    def _choice(self, index: int, answer: int) -> object: ...

    @abstractmethod
    def _pieces(self, index: int, output: Output) -> list[object]: ...

    @abstractmethod
    def _plain(self, index: int, text: str) -> object:
        """Returns the choice of a chunk that contains only text: any chunk between an answer's first and last."""


class CompletionWriter(Writer):
    """Writer of `/v1/completions`: text chunks, the last one with `finish_reason`."""

    kind, chunk_kind = "text_completion", "text_completion"

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        super().__init__(request, model, request_id)
        self._begun: set[int] = set()
        """Answers whose first event was made."""
        self._offsets = [0] * request.answers
        """Text offset of the next token with log-probabilities, for each choice."""

    def add(self, index: int, output: Output) -> None:
        super().add(index, self._without_answer(output))

    def chunk(self, index: int, output: Output) -> bytes:
        """Returns the events of an output, in order."""
        return super().chunk(index, self._without_answer(output))

    def _without_answer(self, output: Output) -> Output:
        """Returns the output without its tokens if the reply contains the prompts alone."""
        if not self._request.only_echo:
            return output
        finish = "length" if output.finish else None
        return msgspec.structs.replace(output, tokens=(), text="", logprobs=(), finish=finish)

    def _choice(self, index: int, answer: int) -> object:
        prompt = answer // self._request.made
        text, logprobs = self._echo(prompt) + self._texts[answer], None
        if self._request.logprobs:
            logprobs = self._completion_logprobs(answer, self._logprobs[answer], first=True)
        choice = r.CompletionChoice(
            index, text, logprobs, self._finish[answer], prompt_logprobs=self._prompt_logprobs(prompt)
        )
        return self._with_tokens(choice, answer, self._tokens[answer], first=True)

    def _echo(self, prompt: int) -> str:
        """Returns the text of a prompt, given by its number, if the request has `echo`; else an empty text."""
        return self._request.echo[prompt] if self._request.echo else ""

    def _with_tokens(
        self, choice: r.CompletionChoice, answer: int, tokens: Sequence[int], *, first: bool
    ) -> r.CompletionChoice:
        """Returns `choice` with the ids of `tokens` if the request has `return_token_ids`. With `first`, also adds
        the ids of the prompt."""
        if not self._request.returns_tokens:
            return choice
        prompt = list(self._request.prompts[answer // self._request.made]) if first else UNSET
        return msgspec.structs.replace(choice, token_ids=list(tokens), prompt_token_ids=prompt)

    def _pieces(self, index: int, output: Output) -> list[object]:
        with_tokens = self._request.returns_tokens and bool(output.tokens)
        first = output.index == 0 and index not in self._begun
        text = (self._echo(index // self._request.made) if first else "") + output.text
        echoes = first and self._request.logprobs and bool(self._request.echo)
        if not (text or output.logprobs or output.finish or with_tokens or echoes):
            return []
        self._begun.add(index)
        logprobs = None
        if output.logprobs or echoes:
            logprobs = self._completion_logprobs(index, output.logprobs, first=first)
        choice = r.CompletionChoice(index, text, logprobs, output.finish)
        return [self._with_tokens(choice, index, output.tokens, first=output.index == 0)]

    def _plain(self, index: int, text: str) -> object:
        return r.CompletionChoice(index, text)

    def _completion_logprobs(
        self, index: int, logprobs: Sequence[TokenLogprobs], *, first: bool
    ) -> r.CompletionLogprobs:
        """Returns the field `logprobs` of an answer's tokens; with `first`, the echoed prompt's tokens precede."""
        found = r.CompletionLogprobs([], [], [], [])
        if first and self._request.echo:
            prompt = index // self._request.made
            self._append(found, index, self._request.prompts[prompt][0], None, None)
            for one in self._scores[prompt]:
                likely = (*one.top[: self._request.sampling.logprobs], (one.token, one.logprob))
                self._append(found, index, one.token, finite(one.logprob), likely)
        for one in logprobs:
            self._append(found, index, one.token, finite(one.logprob), one.top)
        return found

    def _append(
        self,
        found: r.CompletionLogprobs,
        index: int,
        token: int,
        logprob: float | None,
        likely: Sequence[tuple[int, float]] | None,
    ) -> None:
        """Appends one token. Of several tokens with the same name in `likely`, the first one stays."""
        found.tokens.append(self._name(token))
        found.token_logprobs.append(logprob)
        named: dict[str, float] = {}
        for one, value in likely or ():
            named.setdefault(self._name(one), finite(value))
        found.top_logprobs.append(None if likely is None else named)
        found.text_offset.append(self._offsets[index])
        self._offsets[index] += len(self._speller.text(token))

    def _name(self, token: int) -> str:
        return f"token_id:{token}" if self._request.token_ids else self._speller.text(token)
