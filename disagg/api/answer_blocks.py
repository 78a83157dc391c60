"""Divides one answer into blocks: reasoning, content and tool calls, in the order of the text.

The writers of chat completions, responses and messages render these blocks, each in the format of its API.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from disagg.api.parsers.build import AnswerPlan
from disagg.api.parsers.parts import Arguments, Call, Content, Part, Reasoning
from disagg.api.parsers.registry import ParserNames
from disagg.core.random_ids import random_id
from disagg.router.answers import Output

SHORT_ID_CHARACTERS = 9
PLAIN_PLAN = AnswerPlan(ParserNames())
"""Plan of answers without reasoning or calls."""

BlockKind = Literal["reasoning", "content", "call"]


@dataclass(slots=True)
class AnswerBlock:
    """One block of an answer. The text of a call is the JSON text of its arguments."""

    kind: BlockKind
    text: str
    name: str = ""
    call_id: str = ""


class BlockGrowth(NamedTuple):
    """New text of a block."""

    block: int
    """Index of the block."""
    text: str
    begins: bool
    """Whether the block is new."""


class AnswerBlocks:
    """The blocks of one answer so far. Text is added only to the last block."""

    def __init__(self, plan: AnswerPlan | None, call_prefix: str = "call_") -> None:
        """`plan`: None for plain text. `call_prefix`: prefix of call ids, unless the model needs short ids."""
        self._plan = plan or PLAIN_PLAN
        self._parser = self._plan.parser()
        self._call_prefix = call_prefix
        self.blocks: list[AnswerBlock] = []
        self.calls = 0
        """Number of blocks that are calls."""
        self._dropped = False
        """Whether the latest call was dropped, because the answer may have only one call."""

    def push(self, output: Output) -> list[BlockGrowth]:
        """Adds an output; returns the text that became final, in order."""
        parts = self._parser.push(output.text)
        if output.finish is not None:
            parts += self._parser.end()
        return [growth for part in parts if (growth := self._grown(part)) is not None]

    def begin(self, kind: BlockKind, text: str, name: str = "") -> BlockGrowth:
        """Adds a block."""
        call_id = ""
        if kind == "call":
            self.calls += 1
            number = random_id()
            call_id = number[:SHORT_ID_CHARACTERS] if self._plan.short_ids else self._call_prefix + number
        self.blocks.append(AnswerBlock(kind, text, name, call_id))
        return BlockGrowth(len(self.blocks) - 1, text, True)

    def check(self) -> None:
        """Raises an `AssertionError` if the blocks are not consistent."""
        calls = [block for block in self.blocks if block.kind == "call"]
        assert self.calls == len(calls) <= (len(calls) if self._plan.parallel else 1)
        assert len({block.call_id for block in calls}) == len(calls), "call ids are unique"
        for block, following in pairwise(self.blocks):
            assert block.kind == "call" or block.kind != following.kind, (
                "adjacent text of one kind is one block"
            )
        for block in self.blocks:
            assert (block.kind == "call") == bool(block.name) == bool(block.call_id)

    def _grown(self, part: Part) -> BlockGrowth | None:
        match part:
            case Content(text):
                return self._text("content", text)
            case Reasoning(text):
                return self._text("reasoning", text)
            case Call(name, arguments):
                self._dropped = self.calls > 0 and not self._plan.parallel
                return None if self._dropped else self.begin("call", arguments, name)
            case Arguments(text):
                return None if self._dropped else self._more(text)

    def _text(self, kind: BlockKind, text: str) -> BlockGrowth:
        if self.blocks and self.blocks[-1].kind == kind:
            return self._more(text)
        return self.begin(kind, text)

    def _more(self, text: str) -> BlockGrowth:
        self.blocks[-1].text += text
        return BlockGrowth(len(self.blocks) - 1, text, False)
