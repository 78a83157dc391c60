"""Translates messages with content blocks to messages of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from disagg.api.anthropic.fields import (
    BLOCK_OFF,
    MessageTurn,
    PromptBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from disagg.api.body import to_struct
from disagg.api.errors import bad, unsupported_type
from disagg.api.fields import CalledFunction, PromptMessage, RequestedCall

Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock
B = TypeVar("B", bound=Block)
BLOCKS: dict[str, dict[str, type[Block]]] = {
    "user": {"text": TextBlock, "tool_result": ToolResultBlock},
    "assistant": {"text": TextBlock, "thinking": ThinkingBlock, "tool_use": ToolUseBlock},
    "system": {"text": TextBlock},
    "tool_result": {"text": TextBlock},
}
"""Accepted types of blocks, by the place of their list."""


def messages_of(body: PromptBody) -> list[PromptMessage]:
    """Returns the conversation of a request. Raises a 400."""
    if not body.messages:
        raise bad("messages", "messages is empty")
    messages: list[PromptMessage] = []
    if system := _joined(body.system, "system", "system"):
        messages.append(PromptMessage(role="system", content=system))
    for number, fields in enumerate(body.messages):
        at = f"messages[{number}]."
        turn = to_struct(fields, MessageTurn, {}, at)
        blocks = _blocks(turn.content, turn.role, f"{at}content")
        messages += [_answer(blocks)] if turn.role == "assistant" else _question(blocks, at)
    if messages[-1].role == "assistant":
        raise bad(
            "messages",
            "messages ends with a message of role 'assistant': this server cannot continue an answer. End with a "
            "message of role 'user'",
        )
    return messages


def _answer(blocks: list[Block]) -> PromptMessage:
    """Returns a message of the assistant: its reasoning, text and calls."""
    calls = [
        RequestedCall(
            id=block.id,
            function=CalledFunction(name=block.name, arguments=msgspec.json.encode(block.input).decode()),
        )
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    reasoning = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    return PromptMessage(
        role="assistant", content=_texts(blocks), reasoning_content=reasoning or None, tool_calls=calls
    )


def _question(blocks: list[Block], at: str) -> Iterator[PromptMessage]:
    """Yields the messages of a user's turn: each result of a call, and the texts between them."""
    texts: list[Block] = []
    for number, block in enumerate(blocks):
        if not isinstance(block, ToolResultBlock):
            texts.append(block)
            continue
        if texts:
            yield PromptMessage(role="user", content=_texts(texts))
            texts = []
        result = _joined(block.content, "tool_result", f"{at}content[{number}].content")
        yield PromptMessage(role="tool", content=result, tool_call_id=block.tool_use_id)
    if texts or not blocks:
        yield PromptMessage(role="user", content=_texts(texts))


def _joined(content: str | list[dict[str, Any]], place: str, at: str) -> str:
    return _texts(_blocks(content, place, at))


def _texts(blocks: list[Block]) -> str:
    return "\n".join(block.text for block in blocks if isinstance(block, TextBlock))


def _blocks(content: str | list[dict[str, Any]], place: str, at: str) -> list[Block]:
    """Returns the blocks of `content`. Raises a 400. `place`: key of `BLOCKS`; `at`: path of `content`."""
    if isinstance(content, str):
        return [TextBlock(type="text", text=content)]
    return [_block(fields, place, f"{at}[{number}].") for number, fields in enumerate(content)]


def _block(fields: dict[str, Any], place: str, at: str) -> Block:
    kind, kinds = fields.get("type"), BLOCKS[place]
    chosen = kinds.get(kind) if isinstance(kind, str) else None
    if chosen is None:
        raise unsupported_type(at, kind, f" in {place!r}; types are {', '.join(kinds)}")
    return to_struct(fields, chosen, BLOCK_OFF, at)
