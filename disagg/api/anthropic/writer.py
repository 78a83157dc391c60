"""Converts outputs of the router to the reply of `/v1/messages`: a message of content blocks, or its events."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.api.answer_blocks import AnswerBlock
from disagg.api.anthropic.request import ParsedMessages
from disagg.api.block_writer import BlockWriter
from disagg.api.errors import ApiError
from disagg.api.model import ServedModel
from disagg.api.parsers.texts import load_json
from disagg.api.writers import event, named_event

SIGNATURE = "unsigned"
"""Signature of all blocks of reasoning: some clients do not send back a block whose signature is empty."""


class MessagesWriter(BlockWriter):
    """Writer of `/v1/messages`."""

    call_prefix = "toolu_"

    def __init__(self, parsed: ParsedMessages, model: ServedModel, request_id: str) -> None:
        super().__init__(parsed.generation, model, request_id)
        self._shows_thinking = parsed.shows_thinking

    def whole(self) -> bytes:
        content = [self._whole_block(block) for block in self._blocks]
        return msgspec.json.encode({**self._message(content), **self._stop()})

    def tail(self) -> list[bytes]:
        delta = named_event("message_delta", delta=self._stop(), usage=self._usage())
        return [delta, named_event("message_stop")]

    def failed(self, error: ApiError) -> bytes:
        return b"event: error\n" + event(error.anthropic(self._id))

    def _message(self, content: list[Any]) -> dict[str, Any]:
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self._usage(),
        }

    def _stop(self) -> dict[str, str | None]:
        stop_text = self._last.stop_text if self._last is not None else ""
        if self._truncated:
            reason = "max_tokens"
        elif self._answer.calls:
            reason = "tool_use"
        else:
            reason = "stop_sequence" if stop_text else "end_turn"
        return {"stop_reason": reason, "stop_sequence": stop_text if reason == "stop_sequence" else None}

    def _usage(self) -> dict[str, Any]:
        cached = self._cached_tokens or 0
        return {
            "input_tokens": self.prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"thinking_tokens": self._reasoning_tokens},
        }

    def _whole_block(self, block: AnswerBlock) -> dict[str, Any]:
        match block.kind:
            case "reasoning":
                text = block.text if self._shows_thinking else ""
                return {"type": "thinking", "thinking": text, "signature": SIGNATURE}
            case "call" if _is_object(block.text):
                return _call(block, msgspec.Raw(block.text.encode()))
            case _:  # text, or a call whose arguments `max_tokens` truncated
                return {"type": "text", "text": block.text}

    def _started(self) -> list[bytes]:
        return [named_event("message_start", message=self._message([]))]

    def _opened(self, index: int) -> list[bytes]:
        block = self._blocks[index]
        match block.kind:
            case "call":
                empty = _call(block, {})
            case "reasoning":
                empty = {"type": "thinking", "thinking": "", "signature": ""}
            case "content":
                empty = {"type": "text", "text": ""}
        return [named_event("content_block_start", index=index, content_block=empty)]

    def _grew(self, index: int, text: str) -> bytes:
        match self._blocks[index].kind:
            case "call":
                return self._delta(index, "input_json_delta", partial_json=text)
            case "reasoning":
                return self._delta(index, "thinking_delta", thinking=text) if self._shows_thinking else b""
            case "content":
                return self._delta(index, "text_delta", text=text)

    def _closed(self, index: int) -> list[bytes]:
        reasoning = self._blocks[index].kind == "reasoning"
        signed = [self._delta(index, "signature_delta", signature=SIGNATURE)] if reasoning else []
        return [*signed, named_event("content_block_stop", index=index)]

    def _delta(self, index: int, kind: str, **fields: str) -> bytes:
        return named_event("content_block_delta", index=index, delta={"type": kind, **fields})


def _call(block: AnswerBlock, arguments: object) -> dict[str, Any]:
    return {"type": "tool_use", "id": block.call_id, "name": block.name, "input": arguments}


def _is_object(text: str) -> bool:
    try:
        return isinstance(load_json(text), dict)
    except ValueError:
        return False
