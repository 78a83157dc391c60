"""Converts outputs of the router to the reply of `/v1/chat/completions`, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from disagg.api import replies as r
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.parts import Arguments, Call, Content, Part, Reasoning
from disagg.api.writers import Writer
from disagg.core.random_ids import random_id
from disagg.core.types import TokenLogprobs
from disagg.router.answers import Output

SHORT_ID_CHARACTERS = 9


class ChatWriter(Writer):
    """Writer of `/v1/chat/completions`: chunks with the role, then the answer's parts, then `finish_reason`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        super().__init__(request, model, request_id)
        self._begun: set[int] = set()
        plan = request.plan
        self._parsed = [_ParsedAnswer(plan) for _ in range(request.answers)] if plan is not None else []
        """Parser and parts of each answer; empty if answers are plain text."""

    def add(self, index: int, output: Output) -> None:
        super().add(index, output)
        if self._parsed:
            self._parsed[index].push(output)

    def chunk(self, index: int, output: Output) -> bytes:
        """Returns the events of an output, in order."""
        if not self._parsed:
            return super().chunk(index, output)
        self._count(index, output)
        return b"".join(self._event([piece]) for piece in self._pieces(index, output))

    def _choice(self, index: int, answer: int) -> object:
        logprobs = self._chat_logprobs(self._logprobs[answer]) if self._request.logprobs else None
        finish, tokens = self._finish[answer], self._ids(self._tokens[answer])
        if not self._parsed:
            return r.ChatChoice(index, r.ChatMessage(self._texts[answer]), logprobs, finish, tokens)
        parsed = self._parsed[answer]
        return r.ChatChoice(index, parsed.message(), logprobs, parsed.finish(finish), tokens)

    def _ids(self, tokens: Sequence[int]) -> Sequence[int] | UnsetType:
        return list(tokens) if self._request.returns_tokens else UNSET

    def _common_prompt(self) -> Sequence[int] | UnsetType:
        return self._ids(self._request.prompts[0])

    def _common_scores(self) -> r.PromptLogprobs | UnsetType:
        return self._prompt_logprobs(0)

    def _pieces(self, index: int, output: Output) -> list[object]:
        pieces: list[object] = []
        if index not in self._begun:
            self._begun.add(index)
            pieces.append(r.ChatChunkChoice(index, r.Delta(role="assistant", content="")))
        logprobs = self._chat_logprobs(output.logprobs) if output.logprobs else None
        tokens = self._ids(output.tokens) if output.tokens else UNSET
        deltas = self._deltas(index, output)
        if not deltas and (logprobs is not None or tokens is not UNSET):
            deltas = [r.Delta(content="")]
        for delta in deltas:
            pieces.append(r.ChatChunkChoice(index, delta, logprobs, token_ids=tokens))
            logprobs, tokens = None, UNSET
        if output.finish is not None:
            finish = self._parsed[index].finish(output.finish) if self._parsed else output.finish
            pieces.append(r.ChatChunkChoice(index, r.Delta(), finish_reason=finish))
        return pieces

    def _deltas(self, index: int, output: Output) -> list[r.Delta]:
        if self._parsed:
            return self._parsed[index].push(output)
        return [r.Delta(content=output.text)] if output.text else []

    def _plain(self, index: int, text: str) -> object:
        return r.ChatChunkChoice(index, r.Delta(content=text))

    def _chat_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> r.ChatLogprobs:
        return r.ChatLogprobs([self._speller.chat(one) for one in logprobs])


class _ParsedAnswer:
    """One answer that a parser divides into parts."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._plan, self._parser = plan, plan.parser()
        self._content, self._reasoning = "", ""
        self._calls: list[r.ToolCall] = []
        self._dropped = False
        """Whether the latest call was dropped, because the answer may have only one call."""

    def push(self, output: Output) -> list[r.Delta]:
        """Adds an output; returns the deltas of the parts that became final."""
        parts = self._parser.push(output.text)
        if output.finish is not None:
            parts += self._parser.end()
        return [delta for part in parts if (delta := self._delta(part)) is not None]

    def message(self) -> r.ChatMessage:
        """Returns the message of the whole answer."""
        calls, reasoning = self._calls or UNSET, self._reasoning or UNSET
        content = None if self._calls and not self._content else self._content
        return r.ChatMessage(content, tool_calls=calls, reasoning_content=reasoning, reasoning=reasoning)

    def finish(self, reason: str | None) -> str | None:
        """Returns the finish reason of the reply; `reason`: why the generation ended."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _delta(self, part: Part) -> r.Delta | None:
        match part:
            case Content(text):
                self._content += text
                return r.Delta(content=text)
            case Reasoning(text):
                self._reasoning += text
                return r.Delta(reasoning_content=text, reasoning=text)
            case Call(name, arguments):
                return self._call(name, arguments)
            case Arguments(text):
                return self._more(text)

    def _call(self, name: str, arguments: str) -> r.Delta | None:
        self._dropped = bool(self._calls) and not self._plan.parallel
        if self._dropped:
            return None
        number = random_id()
        call_id = number[:SHORT_ID_CHARACTERS] if self._plan.short_ids else f"call_{number}"
        self._calls.append(r.ToolCall(call_id, r.Function(name, arguments)))
        function = r.Function(name, arguments)
        return r.Delta(tool_calls=[r.ToolCallDelta(len(self._calls) - 1, function, call_id, "function")])

    def _more(self, text: str) -> r.Delta | None:
        if self._dropped:
            return None
        function = self._calls[-1].function
        function.arguments = (function.arguments or "") + text
        return r.Delta(tool_calls=[r.ToolCallDelta(len(self._calls) - 1, r.Function(arguments=text))])
