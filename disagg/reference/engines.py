"""Engines that compute reference answers in one process, for comparison with a split system."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from typing import Any, Protocol

import torch
from torch import nn

from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.load.source import ModelSource, load_pretrained
from disagg.model.runner import ModelRunner
from disagg.model.unsplit import forced_logits, generate_unsplit


class ReferenceEngine(Protocol):
    """An engine that runs the whole model in one process."""

    name: str
    models: Sequence[nn.Module]
    """The modules that compute the logits."""

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """Returns the token ids of the greedy answer, at most `max_tokens` of the sampling parameters."""

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
        """Yields the logits `[vocab]` after the prompt, and after each token of `answer` except the last one.

        A tensor is valid until the next tensor is yielded. Steps do not run as CUDA graphs, because noise of
        `disagg.model.rounding.output_noise` must affect them.
        """


class HuggingFace:
    """The reference engine for checkpoints: `generate()` of transformers."""

    name = "Hugging Face generate()"

    def __init__(
        self, source: ModelSource, sampling: SamplingParams, device: torch.device, dtype: torch.dtype
    ) -> None:
        from transformers import GenerationConfig
        from transformers.utils import logging

        logging.disable_progress_bar()
        assert source.directory is not None, "random weights have no checkpoint"
        model = load_pretrained(source.directory, dtype)
        self._model: Any = model.to(device)
        self.models: Sequence[nn.Module] = [self._model]
        self._device = device
        eos = list(source.spec(dtype).eos_ids)
        self._greedy = GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            eos_token_id=eos or None,
            pad_token_id=eos[0] if eos else 0,
        )

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """See `ReferenceEngine.answer`."""
        ids = torch.tensor([list(prompt)], device=self._device)
        output = self._model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=self._greedy
        )
        answer: list[int] = output[0, len(prompt) :].tolist()
        return answer

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `ReferenceEngine.logits`."""
        ids = torch.tensor([[*prompt, *answer[:-1]]], device=self._device)
        with torch.inference_mode():
            found: torch.Tensor = self._model(ids).logits[0, len(prompt) - 1 :]
        yield from found


class Unsplit:
    """Our own engine, with one rank that prefills and decodes."""

    name = "our engine unsplit"

    def __init__(self, runner: ModelRunner, sampling: SamplingParams, chunk_tokens: int) -> None:
        self._runner, self._sampling, self._chunk_tokens = runner, sampling, chunk_tokens
        self.models: Sequence[nn.Module] = [runner.model]

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """See `ReferenceEngine.answer`."""
        return generate_unsplit(self._runner, [prompt], self._sampling, chunk_tokens=self._chunk_tokens)[0]

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `ReferenceEngine.logits`."""
        return forced_logits(self._runner, prompt, answer, chunk_tokens=self._chunk_tokens)


class QuantizedBehindThePrompt:
    """Our own engine with two pools. The prompt's KV is computed in the first pool and quantized into the second."""

    name = Unsplit.name

    def __init__(
        self, first: ModelRunner, then: ModelRunner, sampling: SamplingParams, chunk_tokens: int
    ) -> None:
        self._first, self._then, self._sampling = first, then, sampling
        self._chunk_tokens = chunk_tokens
        self.models: Sequence[nn.Module] = [first.model, then.model]

    def answer(self, prompt: Sequence[int]) -> list[int]:
        """See `ReferenceEngine.answer`."""
        tokens: list[int] = []
        with closing(self._behind(prompt, tokens)) as steps:
            for logits in steps:
                tokens.append(int(logits.argmax()))
                if len(tokens) >= self._sampling.max_tokens or tokens[-1] in self._then.spec.eos_ids:
                    break
        return tokens

    def logits(self, prompt: Sequence[int], answer: Sequence[int]) -> Iterator[torch.Tensor]:
        """See `ReferenceEngine.logits`."""
        return self._behind(prompt, answer[:-1])

    def _behind(self, prompt: Sequence[int], answer: Sequence[int]) -> Generator[torch.Tensor]:
        """Yields logits `[vocab]` after the prompt and after each token of `answer`.

        The caller may append tokens to `answer` between two yields.
        """
        first, then = self._first, self._then
        total = len(prompt) + self._sampling.max_tokens
        slots = [torch.arange(runner.page_size, runner.page_size + total) for runner in (first, then)]
        rows = [_row(runner, its) for runner, its in zip((first, then), slots, strict=True)]
        try:
            yield _computed(first, rows[0], tuple(prompt), 0, self._chunk_tokens)
            here, there = (its[: len(prompt)].to(first.device) for its in slots)
            for computed, stored in zip(first.pool.parts, then.pool.parts, strict=True):
                for layer in range(stored.layers):
                    stored.write(layer, there, *computed.read(layer, here, first.kv_dtype))
            count = 0
            while count < len(answer):
                yield _computed(then, rows[1], (answer[count],), len(prompt) + count, 1)
                count += 1
        finally:
            for runner, row in zip((first, then), rows, strict=True):
                runner.req_to_token.free(row)


def _row(runner: ModelRunner, slots: torch.Tensor) -> int:
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, slots.int())
    return row


def _computed(
    runner: ModelRunner, row: int, tokens: tuple[int, ...], start: int, chunk_tokens: int
) -> torch.Tensor:
    """Computes `tokens`, which begin at position `start`; returns the logits `[vocab]` after the last token."""
    for first in range(0, len(tokens), chunk_tokens):
        piece = tokens[first : first + chunk_tokens]
        logits = runner.forward(StepBatch((SequenceSlice(row, start + first, piece, start + len(tokens)),)))
    return logits[-1]
