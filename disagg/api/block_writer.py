"""Base of the writers of APIs whose reply is one answer as a list of blocks: responses and messages."""

from __future__ import annotations

from abc import abstractmethod

from disagg.api.answer_blocks import AnswerBlock, AnswerBlocks, BlockGrowth
from disagg.api.generation_request import GenerationRequest
from disagg.api.model import ServedModel
from disagg.api.writers import AnswerWriter
from disagg.router.answers import Output


class BlockWriter(AnswerWriter):
    """Divides the answer into blocks, and calls a method for each start, growth and end of a block in a stream."""

    call_prefix: str
    """Prefix of the ids of calls."""

    def __init__(self, request: GenerationRequest, model: ServedModel, request_id: str) -> None:
        super().__init__(request, model, request_id)
        assert request.answers == 1, "these APIs have no field for more answers"
        self._answer = AnswerBlocks(request.plan, self.call_prefix)
        self._last: Output | None = None
        """The last output of the answer; None before."""
        self._begun = False
        """Whether the stream has begun with an event."""
        self._reasoning_tokens = 0
        self._unseen_tokens = 0
        """Tokens since the latest growth: a parser withholds text that may be a marker."""

    @property
    def _blocks(self) -> list[AnswerBlock]:
        return self._answer.blocks

    def add(self, index: int, output: Output) -> None:
        self._count(index, output)
        self._push(output)

    def chunk(self, index: int, output: Output) -> bytes:
        self._count(index, output)
        events = [] if self._begun else self._started()
        self._begun = True
        for growth in self._push(output):
            if growth.begins:
                events += self._closed(growth.block - 1) if growth.block else []
                events += self._opened(growth.block)
            if growth.text:
                events.append(self._grew(growth.block, growth.text))
        if output.finish is not None:
            events += self._closed(len(self._blocks) - 1)
        return b"".join(events)

    def _push(self, output: Output) -> list[BlockGrowth]:
        """Adds an output to the blocks. An answer without text gets one empty block at its end."""
        growths = self._answer.push(output)
        if output.finish is not None:
            self._last = output
            if not self._blocks:
                growths = [self._answer.begin("content", "")]
        self._unseen_tokens += len(output.tokens)
        if growths:
            # Tokens count for the first block to which they add text, so markers count for the block after them.
            if self._blocks[growths[0].block].kind == "reasoning":
                self._reasoning_tokens += self._unseen_tokens
            self._unseen_tokens = 0
        return growths

    @property
    def _truncated(self) -> bool:
        """Whether the limit of tokens ended the answer."""
        return self._last is not None and self._last.finish == "length"

    @abstractmethod
    def _started(self) -> list[bytes]:
        """Returns the first events of a stream."""

    @abstractmethod
    def _opened(self, index: int) -> list[bytes]:
        """Returns the events for the start of a block, without its text."""

    @abstractmethod
    def _grew(self, index: int, text: str) -> bytes:
        """Returns the event for new text of a block."""

    @abstractmethod
    def _closed(self, index: int) -> list[bytes]:
        """Returns the events for the end of a block."""
