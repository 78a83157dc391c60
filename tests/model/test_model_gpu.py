"""The same promises on a GPU: equal tokens however the work is cut, and no host that waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from host_waits import no_host_waits
from model_helpers import ANSWER_TOKENS, load_plain, make_runner, prompts
from plain_greedy import plain_greedy

from disagg.core.types import SamplingParams
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.collective.nccl import NcclCollective
from disagg.model.collective.shared import SharedCollective
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.model.runner_options import RunnerOptions
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow
from disagg.model.unsplit import generate_unsplit

pytestmark = pytest.mark.gpu
Checkpoint = Callable[[str], Path]
GREEDY = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
ARCHITECTURES = ["llama", "qwen3", "mistral", "gemma2"]


@pytest.fixture(autouse=True)
def _exact_float32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    yield
    torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("attention", ["torch", "triton"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_greedy_equals_generate_on_the_gpu(name: str, attention: str, checkpoint: Checkpoint) -> None:
    plain = load_plain(checkpoint(name)).to("cuda")
    expected = [plain_greedy(plain, prompt, ANSWER_TOKENS) for prompt in prompts()]
    for chunk_tokens in (512, 13):
        runner = make_runner(checkpoint(name), device="cuda", attention=attention)
        assert generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=chunk_tokens) == expected


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_tensor_parallel_ranks_on_one_gpu_answer_alike(name: str, size: int, checkpoint: Checkpoint) -> None:
    directory = checkpoint(name)
    expected = generate_unsplit(make_runner(directory, device="cuda"), prompts(), GREEDY)

    def work(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(directory, collective, device="cuda")
        return generate_unsplit(runner, prompts(), GREEDY, chunk_tokens=19)

    assert run_ranks(size, work) == [expected] * size


def test_a_step_never_makes_the_host_wait(checkpoint: Checkpoint) -> None:
    runner, layers = make_runner(checkpoint("gemma2"), device="cuda"), []
    rows = [runner.req_to_token.alloc() for _ in range(3)]
    for row in rows:
        runner.req_to_token.set_slots(row, 0, list(range(16 + 60 * row, 76 + 60 * row)))
    step = StepBatch(tuple(SequenceSlice(row, 0, tuple(range(row + 1))) for row in rows))
    runner.forward(step)
    torch.cuda.synchronize()
    with no_host_waits():
        logits = runner.forward(step, layers.append)
    assert layers == [0, 1, 2]
    assert bool(logits.isfinite().all())


def test_a_real_shape_with_random_weights_is_split_alike() -> None:
    """Llama-3.2-1B in bfloat16: two ranks' logits are those of one, up to rounding."""
    source, text = ModelSource.random_init("llama-3.2-1b", seed=2), prompts()[2]

    def work(collective: ThreadCollective) -> torch.Tensor:
        runner = ModelRunner(
            source,
            RunnerOptions(
                dtype=torch.bfloat16,
                pool_tokens=1024,
                page_size=16,
                rows=1,
                max_tokens=256,
            ),
            collective=collective,
            device="cuda",
        )
        runner.pool.poison()
        row = runner.req_to_token.alloc()
        runner.req_to_token.set_slots(row, 0, list(range(16, 16 + len(text))))
        return runner.forward(StepBatch((SequenceSlice(row, 0, tuple(text)),))).clone()

    (whole,), (first, second) = run_ranks(1, work), run_ranks(2, work)
    assert torch.equal(first, second)
    assert torch.cosine_similarity(whole, first).item() > 0.999


def test_nccl_sums_gpu_tensors(tmp_path: Path) -> None:
    """One rank: NCCL refuses two on one GPU; two GPUs are tested with the whole cluster."""
    collective = NcclCollective(rank=0, size=1, directory=tmp_path, timeout_s=30.0)
    tensor = torch.arange(6.0, device="cuda", dtype=torch.bfloat16)
    collective.all_reduce(tensor)
    collective.barrier()
    assert tensor.tolist() == [0, 1, 2, 3, 4, 5]
    collective.close()


def test_shared_ranks_share_a_gpu(tmp_path: Path) -> None:
    def work(member: ThreadCollective) -> list[float]:
        collective = SharedCollective(rank=member.rank, size=2, directory=tmp_path, timeout_s=30.0)
        tensor = torch.full((3,), member.rank + 1.5, device="cuda")
        collective.all_reduce(tensor)
        found: list[float] = tensor.tolist()
        member.barrier()
        collective.close()
        return found

    assert run_ranks(2, work) == [[4.0, 4.0, 4.0]] * 2


def test_the_sampler_draws_the_same_tokens_as_on_the_cpu() -> None:
    logits = 2 * torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    params = [
        SamplingParams(temperature=0.5 * (i % 4), top_k=i % 3 * 20, top_p=1 - 0.1 * (i % 2), seed=i)
        for i in range(64)
    ]
    rows = [SamplingRow(one, (), None, ahead_tokens=i) for i, one in enumerate(params)]
    assert next_tokens(logits.cuda(), rows, ()) == next_tokens(logits, rows, ())
