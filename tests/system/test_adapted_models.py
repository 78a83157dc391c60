"""Models whose attention disagg adapts, through the whole system: other sizes and pages, preemption."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from adapted import ADAPTED, greedy, save_adapted
from local_groups import local_groups, random_prompts, small_config

from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource

TOKENS = 8


@pytest.fixture(scope="module", params=["falcon-alibi", "gpt-neo", "llama4", "jetmoe"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_adapted(ADAPTED[request.param](), tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(("tp", "pages"), [((2, 1), (4, 16)), ((1, 2), (16, 1))], ids=str)
def test_tokens_are_those_of_generate(directory: Path, tp: tuple[int, int], pages: tuple[int, int]) -> None:
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], pool_tokens=512)
    config = msgspec.structs.replace(
        config,
        prefill=msgspec.structs.replace(config.prefill, max_context_tokens=256),
        decode=msgspec.structs.replace(config.decode, max_context_tokens=256),
    )
    prompts = random_prompts(5, 1, 41, 90)
    with local_groups(config, ModelSource.from_directory(directory)) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=TOKENS, ignore_eos=True))
    found = [answer.tokens for answer in answers]
    assert found == greedy(directory, prompts, found, TOKENS)


def test_recomputed_after_preemption(directory: Path) -> None:
    config = small_config(2, 1, decode_page=4, pool_tokens=256)
    decode = msgspec.structs.replace(
        config.decode,
        pool_tokens=104,
        max_context_tokens=96,
        preemption="recompute",
        chunk_tokens=11,
        watermark=0.0,
    )
    config = msgspec.structs.replace(config, decode=decode)
    prompts = random_prompts(30, 25, 28, 33)
    with local_groups(config, ModelSource.from_directory(directory)) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
        assert groups.decode[0].leader.status().preemptions_total > 0
    found = [answer.tokens for answer in answers]
    assert found == greedy(directory, prompts, found, 24)
