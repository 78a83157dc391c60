"""Converts outputs of the router to the reply of `/v1/chat/completions`, with reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET, UnsetType

from disagg.api import replies as r
from disagg.api.answer_blocks import AnswerBlock, AnswerBlocks, BlockGrowth, BlockKind
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.parsers.build import AnswerPlan
from disagg.api.writers import Writer
from disagg.core.types import TokenLogprobs
from disagg.router.answers import Output


class ChatWriter(Writer):
    """Writer of `/v1/chat/completions`: chunks with the role, then the answer's parts, then `finish_reason`."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        super().__init__(request, model, request_id)
        self._begun: set[int] = set()
        plan = request.plan
        self._parsed = [_ChatAnswer(plan) for _ in range(request.answers)] if plan is not None else []
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


class _ChatAnswer:
    """One answer that a parser divides into parts, in the format of chat completions."""

    def __init__(self, plan: AnswerPlan) -> None:
        self._answer = AnswerBlocks(plan)

    def push(self, output: Output) -> list[r.Delta]:
        """Adds an output; returns the deltas of the parts that became final."""
        return [self._delta(growth) for growth in self._answer.push(output)]

    def message(self) -> r.ChatMessage:
        """Returns the message of the whole answer."""
        content, reasoning = self._joined("content"), self._joined("reasoning") or UNSET
        calls = [
            r.ToolCall(block.call_id, r.Function(block.name, block.text))
            for block in self._answer.blocks
            if block.kind == "call"
        ]
        return r.ChatMessage(
            None if calls and not content else content,
            tool_calls=calls or UNSET,
            reasoning_content=reasoning,
            reasoning=reasoning,
        )

    def finish(self, reason: str | None) -> str | None:
        """Returns the finish reason of the reply; `reason`: why the generation ended."""
        return "tool_calls" if self._answer.calls and reason == "stop" else reason

    def _joined(self, kind: BlockKind) -> str:
        return "".join(block.text for block in self._answer.blocks if block.kind == kind)

    def _delta(self, growth: BlockGrowth) -> r.Delta:
        block, text = self._answer.blocks[growth.block], growth.text
        match block.kind:
            case "content":
                return r.Delta(content=text)
            case "reasoning":
                return r.Delta(reasoning_content=text, reasoning=text)
            case "call":
                return r.Delta(tool_calls=[self._call_delta(growth, block)])

    def _call_delta(self, growth: BlockGrowth, block: AnswerBlock) -> r.ToolCallDelta:
        number = sum(one.kind == "call" for one in self._answer.blocks[: growth.block])
        if growth.begins:
            return r.ToolCallDelta(number, r.Function(block.name, growth.text), block.call_id, "function")
        return r.ToolCallDelta(number, r.Function(arguments=growth.text))
