"""A pool of what a GPU has left: it fits, the largest steps still run, and its last page holds KV like its first."""

from __future__ import annotations

import gc

import pytest
import torch

from disagg.core.config.read import Config, DecodeConfig, PrefillConfig
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.collective.base import SingleCollective
from disagg.model.load.source import ModelSource
from disagg.model.runner import ModelRunner
from disagg.node.assemble import make_runner
from disagg.node.sizing import fill_memory, measure

pytestmark = pytest.mark.gpu
DEVICE = torch.device("cuda", 0)


def logits_at(runner: ModelRunner, first_slot: int) -> torch.Tensor:
    """Of a prompt that is computed in two steps, with its KV from `first_slot` on."""
    tokens = tuple(range(3, 40))
    row = runner.req_to_token.alloc()
    runner.req_to_token.set_slots(row, 0, list(range(first_slot, first_slot + len(tokens))))
    runner.forward(StepBatch((SequenceSlice(row, 0, tokens[:20]),)))
    logits = runner.forward(StepBatch((SequenceSlice(row, 20, tokens[20:]),)))
    runner.req_to_token.free(row)
    return logits


@pytest.mark.parametrize(("role", "section"), [("prefill", PrefillConfig), ("decode", DecodeConfig)])
def test_the_pool_fills_its_share(role: str, section: type[PrefillConfig | DecodeConfig]) -> None:
    gc.collect()  # what earlier tests have left
    torch.cuda.empty_cache()
    others = torch.cuda.memory_reserved(DEVICE)  # of earlier tests of this process whose objects still live
    group = section(tp=1, mem_fraction=0.3).sized("cuda")
    runner = make_runner(Config(), group, ModelSource.random_init("llama-3.2-1b"), SingleCollective(), DEVICE)
    torch.cuda.reset_peak_memory_stats(DEVICE)
    near = logits_at(runner, 16)
    fill_memory(runner, Config(), group, role)
    total = torch.cuda.get_device_properties(DEVICE).total_memory
    assert torch.cuda.memory_allocated(DEVICE) < 0.3 * total
    assert torch.cuda.memory_allocated(DEVICE) > 0.2 * total, "most of it is the pool's"
    measure(runner, Config(), group, role)  # runs the largest steps beside the full pool
    assert torch.cuda.max_memory_reserved(DEVICE) < 0.3 * total + others
    last = runner.pool.slots - 40
    assert last * runner.pool.nbytes // runner.pool.slots > 1 << 34, "beyond what 32 bits could address"
    assert torch.equal(logits_at(runner, last), near)
