"""Our engine's greedy tokens are exactly those of transformers' `generate()`, however the work is cut up."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_helpers import ANSWER_TOKENS, WINDOW_TOKENS, load_plain, make_runner, prompts
from plain_greedy import plain_greedy
from slow_parameters import sampled
from transformers import AutoModelForCausalLM

from disagg.core.types import SamplingParams, dtype_name
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.named import named_config
from disagg.model.unsplit import generate_unsplit

Checkpoint = Callable[[str], Path]
Reference = Callable[[str], list[list[int]]]
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2"]


def test_the_prompts_reach_beyond_the_window_and_the_answers_vary(reference: Reference) -> None:
    assert max(map(len, prompts())) > 3 * WINDOW_TOKENS
    for name in ARCHITECTURES:
        assert min(len(set(answer)) for answer in reference(name)) > 3, name


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(("page_size", "chunk_tokens"), [(1, 512), (16, 13), (64, 3)])
def test_greedy_equals_generate(
    name: str, page_size: int, chunk_tokens: int, checkpoint: Checkpoint, reference: Reference
) -> None:
    """Three rows for four prompts, so prefill chunks and decode tokens of different lengths mix in a step."""
    runner = make_runner(checkpoint(name), page_size=page_size, pages=300 if page_size == 1 else 24)
    assert generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=chunk_tokens) == reference(name)
    runner.req_to_token.check()
    assert runner.req_to_token.free_rows == 3


def test_logits_equal_those_of_transformers(checkpoint: Checkpoint) -> None:
    """One mixed step: a decode token, the rest of a chunked prompt, a whole prompt."""
    runner, plain = make_runner(checkpoint("gemma2")), load_plain(checkpoint("gemma2"))
    texts = prompts()[1:]
    cuts = [len(texts[0]) - 1, 20, 0]
    rows = [runner.req_to_token.alloc() for _ in texts]
    for row, text in zip(rows, texts, strict=True):
        first = 16 * (1 + 4 * row)
        runner.req_to_token.set_slots(row, 0, list(range(first, first + len(text))))
    early = [
        SequenceSlice(row, 0, tuple(text[:cut])) for row, text, cut in zip(rows, texts, cuts, strict=True)
    ]
    runner.forward(StepBatch(tuple(early[:2])))
    late = [
        SequenceSlice(row, cut, tuple(text[cut:])) for row, text, cut in zip(rows, texts, cuts, strict=True)
    ]
    logits = runner.forward(StepBatch(tuple(late)))
    assert logits.dtype == torch.float32
    with torch.no_grad():
        expected = torch.stack([plain(torch.tensor([text])).logits[0, -1] for text in texts])
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-4)


# 12 query heads; KV heads by checkpoint: llama 4, qwen3 2, mistral 6, gemma2 1.
@pytest.mark.parametrize(
    ("name", "size"),
    sampled(
        itertools.product(ARCHITECTURES, [2, 3, 4]),
        lambda name, size: name == "llama" or size == 2 + ARCHITECTURES.index(name) % 3,
    ),
)
def test_every_tensor_parallel_size_answers_alike(
    name: str, size: int, checkpoint: Checkpoint, reference: Reference
) -> None:
    directory, some = checkpoint(name), slice(1, 3)

    def work(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(directory, collective)
        return generate_unsplit(runner, prompts()[some], GREEDY, chunk_tokens=19)

    assert run_ranks(size, work) == [reference(name)[some]] * size


def test_more_ranks_than_kv_heads_with_uneven_mlp(checkpoint: Checkpoint, reference: Reference) -> None:
    """12 ranks: one query head each, four heads replicated three times, an MLP of 100 in parts of 8 and 9."""
    directory = checkpoint("llama")

    def work(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(directory, collective)
        return generate_unsplit(runner, [prompts()[1]], SamplingParams(max_tokens=4, ignore_eos=True))

    assert run_ranks(12, work) == [[reference("llama")[1][:4]]] * 12


def test_biases_are_split_with_their_rows_and_added_once(tmp_path: Path) -> None:
    config = named_config("tiny-llama")
    config.attention_bias = config.mlp_bias = True
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.normal_()
    model.save_pretrained(tmp_path)

    def work(collective: ThreadCollective) -> list[list[int]]:
        return generate_unsplit(make_runner(tmp_path, collective), prompts()[:2], GREEDY)

    expected = [plain_greedy(load_plain(tmp_path), prompt, ANSWER_TOKENS) for prompt in prompts()[:2]]
    assert run_ranks(1, work) == [expected]
    assert run_ranks(3, work) == [expected] * 3


def test_a_bfloat16_model_rounds_no_more_than_that_of_transformers(checkpoint: Checkpoint) -> None:
    """As close to the float32 logits as transformers' own bfloat16 model is."""
    runner = make_runner(checkpoint("llama"), dtype=torch.bfloat16)
    plain = load_plain(checkpoint("llama"))
    row, text = runner.req_to_token.alloc(), prompts()[2]
    runner.req_to_token.set_slots(row, 0, list(range(16, 16 + len(text))))
    logits = runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text)),)))
    with torch.no_grad():
        exact = plain(torch.tensor([text])).logits[0, -1:]
        rounded = plain.to(torch.bfloat16)(torch.tensor([text])).logits[0, -1:].float()
    ours, theirs = ((x - exact).norm().item() for x in (logits, rounded))
    assert theirs > 0
    assert ours < 1.5 * theirs


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_pool_stays_close_and_is_really_used(dtype: torch.dtype, checkpoint: Checkpoint) -> None:
    text, logits = prompts()[2], []
    for kv_dtype in (None, dtype):
        runner = make_runner(checkpoint("llama"), kv_dtype=kv_dtype)
        row = runner.req_to_token.alloc()
        runner.req_to_token.set_slots(row, 0, list(range(16, 16 + len(text))))
        logits.append(runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text)),))))
    assert runner.spec.layout.dtype == dtype_name(dtype)
    similarity = torch.cosine_similarity(*logits).item()
    assert 0.99 < similarity < 1 - 1e-6
