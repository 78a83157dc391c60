"""The whole system on a GPU, Triton kernels and streams included, against our own engine unsplit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from local_groups import Checkpoints, local_groups, random_prompts, small_config

from disagg.core.config.read import ModelConfig
from disagg.core.types import SamplingParams
from disagg.model.collective.base import SingleCollective
from disagg.model.unsplit import generate_unsplit
from disagg.node.assemble import make_runner

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)


@pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "written"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2), (3, 2), (4, 3)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
@pytest.mark.parametrize(("pages", "ring_bytes"), [((16, 16), 1 << 20), ((1, 64), 4096), ((64, 1), 1 << 20)])
def test_tokens_are_those_of_the_unsplit_engine(
    checkpoints: Checkpoints, tp: tuple[int, int], pages: tuple[int, int], ring_bytes: int, peer_memory: bool
) -> None:
    source = checkpoints.source()
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], ring_bytes=ring_bytes)
    transport = msgspec.structs.replace(config.transport, peer_memory=peer_memory)
    config = msgspec.structs.replace(config, model=ModelConfig(dtype="float32"), transport=transport)
    prompts = random_prompts(5, 61, 150, 90, seed=1)
    runner = make_runner(config, config.decode, source, SingleCollective(), DEVICE)
    expected = generate_unsplit(runner, prompts, SamplingParams(max_tokens=12))
    with local_groups(config, source, device="cuda:0") as groups:
        for _ in range(3):  # again and again over the same pages and ring
            answers = groups.answers(prompts, SamplingParams(max_tokens=12))
            assert [answer.tokens for answer in answers] == expected
        statistics = [rank.statistics()["transfer"] for rank in groups.prefill]
        assert all(s.segments_written == (s.segments_sent if peer_memory else 0) for s in statistics)


@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
def test_the_device_reports_writes_by_completion_words(checkpoints: Checkpoints, tp: tuple[int, int]) -> None:
    source = checkpoints.source()
    config = small_config(*tp, peer_memory=True, completion_words=True)
    config = msgspec.structs.replace(config, model=ModelConfig(dtype="float32"))
    prompts = random_prompts(5, 61, 150, 90, seed=1)
    runner = make_runner(config, config.decode, source, SingleCollective(), DEVICE)
    expected = generate_unsplit(runner, prompts, SamplingParams(max_tokens=12))
    with local_groups(config, source, device="cuda:0") as groups:
        for _ in range(3):
            answers = groups.answers(prompts, SamplingParams(max_tokens=12))
            assert [answer.tokens for answer in answers] == expected
        statistics = [rank.statistics()["transfer"] for rank in groups.prefill]
    assert all(one.segments_written == one.segments_sent for one in statistics)
    assert sum(one.segments_reported for one in statistics) > 0
