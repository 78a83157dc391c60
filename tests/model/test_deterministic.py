"""With `model.deterministic` a request's logits have the same bits whatever else is in the step, and however its
tokens are cut into steps: on a CPU with the reference kernels, on GPUs with Triton's.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import CLASSED, MLA, SIZES, save
from model_helpers import make_runner
from slow_parameters import sampled
from transformers import (
    DeepseekV3Config,
    Gemma2Config,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    Olmo2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from disagg.core.errors import UnsupportedModelError
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.row_wise import RowWise
from disagg.model.runner import ModelRunner

CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)
DEVICES = ["cpu", CUDA]
SLOTS_EACH = 112
TOKENS = 75
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 32,
}

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**SIZES),
    "windows and soft caps": lambda: Gemma2Config(
        **SIZES, sliding_window=16, attn_logit_softcapping=5.0, final_logit_softcapping=30.0
    ),
    "norms of heads": lambda: Qwen3Config(**SIZES),
    "norms over all heads": lambda: Olmo2Config(**SIZES),
    "experts": lambda: Qwen3MoeConfig(**SIZES, **_EXPERTS),
    "sinks, windows and experts": lambda: GptOssConfig(**SIZES, num_local_experts=4, sliding_window=16),
    "latent attention and routed experts": lambda: DeepseekV3Config(**SIZES | MLA, **_ROUTED),
    "layer norms and biases": lambda: GPT2Config(
        vocab_size=259, n_embd=64, n_layer=2, n_head=4, n_positions=256, initializer_range=0.2
    ),
    "layers that choose their tokens": CLASSED["deepseek-3.2"],
    "layers that share a choice": CLASSED["hy-v4"],
}
SPARSE = {"layers that choose their tokens", "layers that share a choice"}
"""Models whose indexers score one sequence at a time, so their steps are slow and are not recorded."""
SAMPLE = {
    "llama",
    "sinks, windows and experts",
    "latent attention and routed experts",
    "layer norms and biases",
    "layers that share a choice",
}
"""Models that together have every kind of layer of `CONFIGS` except norms of and over heads, and soft caps."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(name: str) -> Path:
        if name not in made:
            made[name] = save(CONFIGS[name](), tmp_path_factory.mktemp("model"))
        return made[name]

    return of


def runner_of(directory: Path, device: str, rows: int, collective: Any = None, **more: Any) -> ModelRunner:
    runner = make_runner(
        directory,
        collective,
        pages=(rows + 1) * SLOTS_EACH // 16,
        rows=rows,
        device=device,
        dtype=torch.float32 if device == "cpu" else torch.bfloat16,
        max_tokens=SLOTS_EACH,
        deterministic=True,
        **more,
    )
    for number in range(rows):
        row = runner.req_to_token.alloc()
        runner.req_to_token.set_slots(
            row, 0, list(range((number + 1) * SLOTS_EACH, (number + 2) * SLOTS_EACH))
        )
    return runner


@dataclass
class Others:
    """Requests that come and go: each step computes some tokens of each of `count` of them."""

    count: int
    rows: list[int]
    rng: random.Random
    _at: dict[int, int] = field(default_factory=dict)

    def slices(self) -> Iterator[SequenceSlice]:
        for row in self.rng.sample(self.rows, self.count):
            start = self._at.get(row, 0)
            if start > TOKENS - 8 or self.rng.random() < 0.1:
                start = 0
            tokens = 1 if start and self.rng.random() < 0.7 else self.rng.randint(1, 8)
            self._at[row] = start + tokens
            yield SequenceSlice(row, start, tuple(self.rng.choices(range(256), k=tokens)))


def run(runner: ModelRunner, tokens: list[int], cuts: list[int], others: Others) -> dict[int, torch.Tensor]:
    """Logits after `tokens[:cut]` for each of `cuts`, computed in row 0 in those pieces beside the others."""
    found, start = {}, 0
    for cut in cuts:
        slices = [*others.slices(), SequenceSlice(0, start, tuple(tokens[start:cut]))]
        others.rng.shuffle(slices)
        slices.sort(key=lambda one: len(one.tokens) > 1)  # single tokens first, as schedulers plan them
        own = next(i for i, one in enumerate(slices) if one.row == 0)
        found[cut] = runner.forward(StepBatch(tuple(slices)))[own].clone()
        start = cut
    return found


def compare(runner: ModelRunner, busy: tuple[int, ...]) -> None:
    rng = random.Random(3)
    tokens = rng.choices(range(256), k=TOKENS)
    rows = runner.req_to_token.table.shape[0] - 2  # row 0 is the request's own, the last one trash
    no_others = Others(0, [], rng)
    alone = run(runner, tokens, [40, *range(41, TOKENS + 1)], no_others)
    assert len({tuple(logits.tolist()) for logits in alone.values()}) == len(alone)
    for count in busy:
        others = Others(count, list(range(1, rows + 1)), rng)
        for cuts in ([40, *range(41, 60)], [13, 14, 27, 40, 41, 57, TOKENS], [64, 65, 66, TOKENS]):
            for cut, logits in run(runner, tokens, cuts, others).items():
                if cut in alone:
                    assert torch.equal(logits, alone[cut]), (count, cuts, cut)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", sampled(CONFIGS, lambda name: name in SAMPLE))
def test_the_same_bits_beside_others(name: str, device: str, directory: Callable[[str], Path]) -> None:
    rows = 8 if device == "cpu" else 256
    runner = runner_of(directory(name), device, rows)
    on_cpu = (1, 5) if name == "llama" or name not in SAMPLE else (5,)
    compare(runner, on_cpu if device == "cpu" else (1, 7) if name in SPARSE else (1, 7, 63, 255))


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in CONFIGS if name not in SPARSE])
@pytest.mark.parametrize("kind", ["decode", "chunks"])
def test_the_same_bits_recorded(name: str, kind: str, directory: Callable[[str], Path]) -> None:
    launched, recorded = (runner_of(directory(name), "cuda:0", 64) for _ in "12")
    if kind == "decode":
        recorded.record(64)
    else:
        recorded.record_chunks(256)
    assert recorded.recorded
    tokens = random.Random(1).choices(range(256), k=TOKENS)
    cuts = [40, *range(41, 60), 70, TOKENS]
    alone = run(launched, tokens, cuts, Others(0, [], random.Random(1)))
    beside = run(recorded, tokens, cuts, Others(7, list(range(1, 60)), random.Random(2)))
    assert all(torch.equal(beside[cut], alone[cut]) for cut in cuts)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama", marks=pytest.mark.slow),
        pytest.param("norms over all heads", marks=pytest.mark.slow),
        "latent attention and routed experts",
    ],
)
def test_the_same_bits_on_two_ranks(name: str, device: str, directory: Callable[[str], Path]) -> None:
    def rank(collective: ThreadCollective) -> None:
        compare(runner_of(directory(name), device, 8, collective), (5,))

    run_ranks(2, rank)


def test_an_unknown_operation_is_refused_by_name() -> None:
    x = torch.randn(3, 4)
    with (
        RowWise("SomeModel"),
        pytest.raises(UnsupportedModelError, match=r"SomeModel .* summation order of cumsum"),
    ):
        x.cumsum(0)


def test_what_would_be_another_value_is_refused() -> None:
    x = torch.randn(3, 4)
    operations: dict[str, Callable[[], torch.Tensor]] = {
        "norms of order 1.5": lambda: torch.linalg.vector_norm(x, 1.5, dim=-1),
        "sums of torch.float64": lambda: x.softmax(-1, dtype=torch.float64),
        "torch.complex64": lambda: (x * 1j) @ x.t().to(torch.complex64),
    }
    for said, operation in operations.items():
        with torch.inference_mode(), RowWise("SomeModel"), pytest.raises(ValueError, match=said):
            operation()


@pytest.mark.parametrize("device", DEVICES)
def test_row_by_row_is_what_torch_computes(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(5, 6, 40, generator=generator).to(device) for _ in range(3))
    weight, bias = (
        torch.randn(7, 40, generator=generator).to(device),
        torch.randn(7, generator=generator).to(device),
    )
    operations: dict[str, Callable[[], torch.Tensor]] = {
        "linear": lambda: torch.nn.functional.linear(x, weight, bias),
        "matmul": lambda: x @ y.transpose(1, 2),
        "mv": lambda: x[0] @ weight[0],
        "dot": lambda: weight[0] @ weight[1],
        "addmm": lambda: torch.addmm(x[0, :, :7], x[0], weight.t(), beta=0.5, alpha=2),
        "baddbmm": lambda: torch.baddbmm(x[:, :, :6], x, y.transpose(1, 2), beta=0.5, alpha=2),
        "einsum": lambda: torch.einsum("bij,bkj->bik", x, z),
        "sum": lambda: x.sum(),
        "sum of a middle dimension": lambda: x.sum(1),
        "sum of two": lambda: x.sum((0, 2), keepdim=True),
        "mean": lambda: x.mean(-1, keepdim=True),
        "sum over none": lambda: x[:0].sum(0),
        "sum of one": lambda: x[0, 0, 0].sum(0),
        "addmm to nothing": lambda: torch.addmm(x[0, 0, :7] / 0, x[0], weight.t(), beta=0),
        "variance": lambda: x.var(-1, correction=0),
        "standard deviation": lambda: x.std(-1, keepdim=True),
        "biased standard deviation": lambda: x.std(unbiased=False),
        "norm": lambda: x.norm(dim=-1),
        "softmax": lambda: x.softmax(1),
        "log softmax": lambda: x.log_softmax(-1),
        "layer norm": lambda: torch.nn.functional.layer_norm(x, (40,), weight[0], weight[1], 1e-5),
        "rms norm": lambda: torch.nn.functional.rms_norm(x, (40,), weight[0], 1e-5),
        "topk": lambda: x.topk(3).values,
        "gelu": lambda: torch.nn.functional.gelu(x),
        "gelu by tanh": lambda: torch.nn.functional.gelu(x, approximate="tanh"),
        "silu": lambda: torch.nn.functional.silu(x),
        "sigmoid": lambda: x.sigmoid(),
        "log1p": lambda: (x.abs() * 1e-5).log1p(),
        "softplus": lambda: torch.nn.functional.softplus(x),
        "index_add": lambda: x.clone().index_add_(
            1, torch.tensor([4, 0, 1], device=device), y[:, :3], alpha=2
        ),
    }
    for name, operation in operations.items():
        own = operation()
        with torch.inference_mode(), RowWise("SomeModel") as mode:
            ours = operation()
        assert mode.replaced or device != "cpu", name
        torch.testing.assert_close(
            ours, own, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}"
        )
