"""Converts outputs of the router to the reply of `/v1/responses`: a list of items, or their events.

A block of the answer becomes an item: reasoning, a message, or a function call.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from disagg.api.block_writer import BlockWriter
from disagg.api.errors import ApiError
from disagg.api.model import ServedModel
from disagg.api.openai_responses.request import ParsedResponses
from disagg.api.writers import named_event
from disagg.core.random_ids import random_id

ITEM_PREFIXES = {"content": "msg_", "reasoning": "rs_", "call": "fc_"}
"""Prefix of an item's id, by the kind of its block."""


class ResponsesWriter(BlockWriter):
    """Writer of `/v1/responses`."""

    call_prefix = "call_"

    def __init__(self, parsed: ParsedResponses, model: ServedModel, request_id: str) -> None:
        super().__init__(parsed.generation, model, request_id)
        self._echo = parsed.echo
        self._items = random_id()
        """Common part of the items' ids."""
        self._events = 0

    def whole(self) -> bytes:
        return msgspec.json.encode(self._response(self._status))

    def tail(self) -> list[bytes]:
        status = self._status
        return [self._event(f"response.{status}", response=self._response(status))]

    def failed(self, error: ApiError) -> bytes:
        refused = "rate_limit_exceeded" if error.status == 429 else "invalid_prompt"
        code = refused if error.status < 500 else "server_error"
        response = self._response("failed", {"code": code, "message": error.message})
        return self._event("response.failed", response=response)

    @property
    def _status(self) -> str:
        return "incomplete" if self._truncated else "completed"

    def _response(self, status: str, error: Mapping[str, str] | None = None) -> dict[str, Any]:
        """Returns the response object. A response in progress has no output: its events contain the items."""
        began = status == "in_progress"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "error": error,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._model.name,
            "output": [] if began else [self._item(index) for index in range(len(self._blocks))],
            "usage": None if began else self._usage(),
            **self._echo,
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self.prompt_tokens,
            "input_tokens_details": {"cached_tokens": self._cached_tokens or 0, "cache_write_tokens": 0},
            "output_tokens": self.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._reasoning_tokens},
            "total_tokens": self.prompt_tokens + self.completion_tokens,
        }

    def _item_id(self, index: int) -> str:
        return f"{ITEM_PREFIXES[self._blocks[index].kind]}{self._items}{index}"

    def _item(self, index: int, *, begun: bool = False) -> dict[str, Any]:
        """Returns the item of a block. With `begun`, the item is in progress and has no content yet."""
        block, last = self._blocks[index], index == len(self._blocks) - 1
        unfinished = last and (self._last is None or self._truncated)
        status = "in_progress" if begun else "incomplete" if unfinished else "completed"
        item: dict[str, Any] = {"id": self._item_id(index), "status": status}
        text = "" if begun else block.text
        match block.kind:
            case "call":
                call = {"call_id": block.call_id, "name": block.name, "arguments": text}
                return {"type": "function_call", **item, **call}
            case "reasoning":
                content = [] if begun else [_part("reasoning_text", text)]
                more = {"summary": [], "content": content, "encrypted_content": None}
                return {"type": "reasoning", **item, **more}
            case "content":
                content = [] if begun else [_part("output_text", text)]
                return {"type": "message", **item, "role": "assistant", "content": content}

    def _started(self) -> list[bytes]:
        kinds = ("response.created", "response.in_progress")
        return [self._event(kind, response=self._response("in_progress")) for kind in kinds]

    def _opened(self, index: int) -> list[bytes]:
        item = self._item(index, begun=True)
        events = [self._event("response.output_item.added", output_index=index, item=item)]
        if self._blocks[index].kind != "call":
            part = _part(self._part_kind(index), "")
            events.append(self._part_event("response.content_part.added", index, part=part))
        return events

    def _grew(self, index: int, text: str) -> bytes:
        match self._blocks[index].kind:
            case "call":
                return self._item_event("response.function_call_arguments.delta", index, delta=text)
            case "reasoning":
                return self._part_event("response.reasoning_text.delta", index, delta=text)
            case "content":
                return self._part_event("response.output_text.delta", index, delta=text, logprobs=[])

    def _closed(self, index: int) -> list[bytes]:
        block = self._blocks[index]
        match block.kind:
            case "call":
                done = {"name": block.name, "arguments": block.text}
                events = [self._item_event("response.function_call_arguments.done", index, **done)]
            case "reasoning":
                events = [self._part_event("response.reasoning_text.done", index, text=block.text)]
            case "content":
                events = [self._part_event("response.output_text.done", index, text=block.text, logprobs=[])]
        if block.kind != "call":
            part = _part(self._part_kind(index), block.text)
            events.append(self._part_event("response.content_part.done", index, part=part))
        return [
            *events,
            self._event("response.output_item.done", output_index=index, item=self._item(index)),
        ]

    def _part_kind(self, index: int) -> str:
        return "reasoning_text" if self._blocks[index].kind == "reasoning" else "output_text"

    def _part_event(self, kind: str, index: int, **fields: object) -> bytes:
        return self._item_event(kind, index, content_index=0, **fields)

    def _item_event(self, kind: str, index: int, **fields: object) -> bytes:
        return self._event(kind, item_id=self._item_id(index), output_index=index, **fields)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._events = self._events, self._events + 1
        return named_event(kind, sequence_number=number, **fields)


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "reasoning_text":
        return {"type": kind, "text": text}
    return {"type": kind, "text": text, "annotations": [], "logprobs": []}
