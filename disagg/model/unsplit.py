"""The unsplit engine: prefills and decodes on the same ranks. Its answers are the reference for the split system."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from disagg.core.errors import ConfigError, InvariantError, PromptTooLongError, RequestError
from disagg.core.sampling import ending_tokens
from disagg.core.types import SamplingParams, Span
from disagg.kv.pages import TokenToKVPoolAllocator, pages_for, slots_of
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.chunks import PromptChunks
from disagg.model.runner import ModelRunner
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow, TokenHistory, history_of
from disagg.model.spec.model_spec import require_one_rope


@dataclass
class _Request:
    index: int
    prompt: tuple[int, ...]
    params: SamplingParams
    row: int = -1
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    answer: list[int] = field(default_factory=list)
    history: TokenHistory | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return (*self.prompt, *self.answer)

    def finished(self, eos_ids: tuple[int, ...]) -> bool:
        """Returns whether the last token ends the answer; that token belongs to the answer."""
        stops = ending_tokens(self.params, eos_ids)
        return len(self.answer) >= self.params.max_tokens or (bool(self.answer) and self.answer[-1] in stops)


def generate_unsplit(
    runner: ModelRunner,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    chunk_tokens: int = 512,
) -> list[list[int]]:
    """Returns the answers to all prompts, by continuous batching with prefill in chunks of `chunk_tokens`.

    All ranks of a group call this function with the same arguments; sampling must then be greedy or seeded. `stop`
    strings are ignored, because they need a tokenizer. Raises PromptTooLongError for a request larger than the pool.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts) or chunk_tokens < 1:
        raise ConfigError(
            f"{len(each)} params for {len(prompts)} prompts, chunk_tokens = {chunk_tokens}: there must be one params "
            "for each prompt, and chunk_tokens must be at least 1"
        )
    engine = _Engine(runner, PromptChunks.of(runner.spec, chunk_tokens, deterministic=runner.deterministic))
    requests = [
        _Request(index, tuple(prompt), p, history=history_of(prompt, p))
        for index, (prompt, p) in enumerate(zip(prompts, each, strict=True))
    ]
    engine.run(requests)
    return [request.answer for request in requests]


def forced_logits(
    runner: ModelRunner, prompt: Sequence[int], answer: Sequence[int], *, chunk_tokens: int = 512
) -> Iterator[torch.Tensor]:
    """Yields the logits, float32 `[vocab]`, after the prompt and after each token of `answer` except the last one.

    The prompt is computed in chunks of `chunk_tokens`, the answer token by token, without CUDA graphs. Each step
    overwrites the previous logits. All ranks of a group call this function with the same arguments; no other request
    may use the pool at the same time.
    """
    table, tokens = runner.req_to_token, (*prompt, *answer[:-1])
    row = table.alloc()
    pages = range(1, 1 + pages_for(len(tokens), runner.page_size))  # page 0 is the trash page
    table.set_slots(row, 0, slots_of(pages, runner.page_size, Span(0, len(tokens))))
    chunks = PromptChunks.of(runner.spec, chunk_tokens, deterministic=runner.deterministic)
    starts = [*(one.start for one in chunks.spans(len(prompt))), *range(len(prompt), len(tokens))]
    try:
        for start, stop in zip(starts, [*starts[1:], len(tokens)], strict=True):
            piece = SequenceSlice(row, start, tokens[start:stop], len(prompt))
            with runner.eager():
                logits = runner.forward(StepBatch((piece,)))[0]
            if stop >= len(prompt):
                yield logits
    finally:
        table.free(row)


class _Engine:
    def __init__(self, runner: ModelRunner, chunks: PromptChunks) -> None:
        self._runner = runner
        self._chunks = chunks
        self._allocator = TokenToKVPoolAllocator(runner.pages, runner.page_size)
        self._running: list[_Request] = []

    def run(self, requests: list[_Request]) -> None:
        waiting = list(requests)
        for request in waiting:
            self._require_fits(request)
        try:
            while waiting or self._running:
                while waiting and self._admit(waiting[0]):
                    self._running.append(waiting.pop(0))
                self._step()
        finally:
            for request in list(self._running):
                self._release(request)

    def _require_fits(self, request: _Request) -> None:
        total = len(request.prompt) + request.params.max_tokens
        longest = self._runner.req_to_token.max_tokens
        room = min(longest, self._allocator.free_pages * self._runner.page_size)
        require_one_rope(self._runner.spec, len(request.prompt), request.params.max_tokens)
        if not request.prompt or total > room:
            raise PromptTooLongError(
                f"request {request.index}: {len(request.prompt)} prompt tokens and up to {request.params.max_tokens} "
                f"answer tokens; the prompt must not be empty, and max_tokens and the KV pool have room for {room}"
            )

    def _admit(self, request: _Request) -> bool:
        """Reserves a row and all pages that the request can need, so that an admitted request never waits for pages.

        Returns whether rows and pages were free.
        """
        total = len(request.prompt) + request.params.max_tokens
        table = self._runner.req_to_token
        room = pages_for(total, self._runner.page_size) <= self._allocator.free_pages
        if not (room and table.free_rows):
            return False
        self._allocator.alloc_tokens(0, total, request.pages)
        request.row = table.alloc()
        table.set_slots(request.row, 0, slots_of(request.pages, self._runner.page_size, Span(0, total)))
        return True

    def _step(self) -> None:
        slices, chosen, budget = [], [], self._chunks.chunk_tokens
        must = True  # the first prompt chunk of a step may exceed the budget
        for request in sorted(self._running, key=lambda r: len(r.tokens) - r.computed):  # decodes first
            start, stop = request.computed, len(request.tokens)
            if count := 1 if request.answer else self._chunks.take(start, stop, budget, must=must):
                budget -= count
                must &= bool(request.answer)
                tokens = request.tokens[start : start + count]
                slices.append(SequenceSlice(request.row, start, tokens, len(request.prompt)))
                chosen.append(request)
        if not slices:
            raise InvariantError(f"no step can be planned for {len(self._running)} running requests")
        logits = self._runner.forward(StepBatch(tuple(slices)))
        for request, piece in zip(chosen, slices, strict=True):
            request.computed = piece.stop
        ready = [i for i, request in enumerate(chosen) if request.computed == len(request.tokens)]
        self._sample(logits[ready], [chosen[i] for i in ready])

    def _sample(self, logits: torch.Tensor, requests: list[_Request]) -> None:
        if not requests:
            return
        eos_ids = self._runner.spec.eos_ids
        rows = [SamplingRow(request.params, request.answer, request.history) for request in requests]
        for request, chosen in zip(requests, next_tokens(logits, rows, eos_ids), strict=True):
            if isinstance(chosen, RequestError):
                raise chosen
            request.answer.append(chosen.token)
            if request.finished(eos_ids):
                self._release(request)

    def _release(self, request: _Request) -> None:
        self._running.remove(request)
        self._allocator.free(request.pages)
        self._runner.req_to_token.free(request.row)
