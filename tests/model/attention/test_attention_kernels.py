"""Models whose attention the Triton kernels do: the same tokens as transformers', and who decides.

The first two run in Triton's interpreter (`tests/kernels/test_kernels_interpreted.py`) and on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from model_helpers import load_plain, make_runner, prompts
from plain_greedy import plain_greedy

from disagg.core.errors import ConfigError
from disagg.core.types import SamplingParams
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.batch import SequenceSlice, StepBatch, build_index
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.unsplit import generate_unsplit
from kernels.dispatch import INTERPRETED

DEVICES = [*(["cpu"] if INTERPRETED else []), pytest.param("cuda", marks=pytest.mark.gpu)]
ONLY_SLOW = [pytest.mark.slow] if INTERPRETED else []
"""For tests that take seconds in the interpreter; the parts of a step are in shorter tests there."""
TOKENS = 3
GREEDY = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
Checkpoint = Callable[[str], Path]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [pytest.param(one, marks=ONLY_SLOW) for one in ("mistral", "gemma2")])
def test_greedy_equals_generate(name: str, device: str, checkpoint: Checkpoint) -> None:
    """Chunks beside single tokens, windows, a soft cap; in a poisoned pool. Small layers in kernels of their own."""
    model = load_plain(checkpoint(name)).to(device)
    texts = prompts()[1:3]
    expected = [plain_greedy(model, prompt, TOKENS) for prompt in texts]
    runner = make_runner(checkpoint(name), device=device, attention="triton")
    assert runner.attention_kernels
    assert "forward" in vars(runner.model.model.norm)
    assert generate_unsplit(runner, texts, GREEDY, chunk_tokens=29) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_dtype", [torch.int8, torch.float8_e4m3fn])
def test_a_quantized_pool_gives_what_the_torch_path_gives(
    kv_dtype: torch.dtype, device: str, checkpoint: Checkpoint
) -> None:
    if INTERPRETED and kv_dtype != torch.int8:
        pytest.skip("Triton's interpreter cuts off where the device rounds")

    def answers(attention: str) -> list[list[int]]:
        runner = make_runner(checkpoint("llama"), device=device, attention=attention, kv_dtype=kv_dtype)
        return generate_unsplit(runner, prompts()[:2], GREEDY)

    assert answers("triton") == answers("torch")


@pytest.mark.parametrize(
    ("sizes", "decoded"),
    [((1, 1, 1), 3), ((1, 1, 5, 1), 2), ((4, 1), 0), ((1,), 1)],
)
def test_single_tokens_before_chunks_are_split_over_their_context(
    sizes: tuple[int, ...], decoded: int
) -> None:
    """In a step of both, a running answer must not wait for one program that goes over all of its context."""
    table = ReqToTokenPool(len(sizes), 32)
    rows = [table.alloc() for _ in sizes]
    for row in rows:
        table.set_slots(row, 0, list(range(32)))
    slices = [SequenceSlice(row, 9 + row, (0,) * size) for row, size in zip(rows, sizes, strict=True)]
    index = build_index(StepBatch(tuple(slices)), table, kernels=True).kernels
    assert index is not None
    assert index.rows.tolist() == rows[:decoded]
    assert index.lengths.tolist() == [one.stop for one in slices[:decoded]]
    assert index.chunks.rows.tolist() == rows[decoded:]
    assert index.chunks.firsts.tolist() == [sum(sizes[decoded:i]) for i in range(decoded, len(sizes))]
    assert index.chunks.starts.tolist() == [one.start for one in slices[decoded:]]
    assert index.chunks.counts.tolist() == list(sizes[decoded:])
    assert index.chunks.most == max(sizes[decoded:], default=0)


def test_without_a_gpu_torch_computes_unless_triton_is_selected(checkpoint: Checkpoint) -> None:
    assert not make_runner(checkpoint("llama"), attention="torch").attention_kernels
    if INTERPRETED:
        return
    assert not make_runner(checkpoint("llama")).attention_kernels
    with pytest.raises(
        ConfigError, match=r"model\.attention = triton cannot be used for Llama.*does not run on cpu"
    ):
        make_runner(checkpoint("llama"), attention="triton")


def test_heads_that_the_kernels_cannot_map_go_to_torch(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twelve query heads of four KV heads on three ranks: on the outer ones groups of one and three."""
    monkeypatch.setattr("disagg.model.attention.kernel_step.unsupported", lambda *sizes: "")

    def uses(collective: ThreadCollective) -> bool:
        return make_runner(checkpoint("llama"), collective).attention_kernels

    assert run_ranks(3, uses) == [False, True, False]
    with pytest.raises(ConfigError, match="KV heads of this rank have different numbers of query heads"):
        run_ranks(3, lambda collective: make_runner(checkpoint("llama"), collective, attention="triton"))
