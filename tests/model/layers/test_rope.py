"""Rotary embeddings that change with length: each request gets what it would get alone, however steps mix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import LONGROPE, SIZES, save
from model_helpers import load_plain, make_runner
from plain_greedy import plain_greedy
from transformers import LlamaConfig, Phi3Config

from disagg.core.errors import PromptTooLongError
from disagg.core.types import SamplingParams
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.layers.rope import LengthRope
from disagg.model.unsplit import generate_unsplit

SWITCH_TOKENS = 40
ANSWER_TOKENS = 8
LENGTHS = (5, SWITCH_TOKENS - ANSWER_TOKENS + 1, SWITCH_TOKENS + 1, 77)
"""Short, just short (its last key is the last before the switch), just long, long."""


def texts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(9)
    return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]


def configs() -> dict[str, Any]:
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    return {
        "phi3": Phi3Config(**SIZES, rope_parameters=LONGROPE, original_max_position_embeddings=SWITCH_TOKENS),
        "llama": LlamaConfig(**SIZES, rope_parameters=LONGROPE),
        "dynamic": LlamaConfig(**SIZES, rope_parameters=dynamic),
    }


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["phi3", "llama", "dynamic"])
def test_short_and_long_requests_in_the_same_steps(name: str, size: int, tmp_path: Path) -> None:
    directory = save(configs()[name], tmp_path)
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)

    def work(collective: ThreadCollective) -> list[list[int]]:
        runner = make_runner(directory, collective if size > 1 else None)
        return generate_unsplit(runner, texts(LENGTHS), params, chunk_tokens=13)

    plain = load_plain(directory)
    expected = [plain_greedy(plain, text, ANSWER_TOKENS) for text in texts(LENGTHS)]
    assert run_ranks(size, work) == [expected] * size


def test_the_switch_changes_answers(tmp_path: Path) -> None:
    """Else the test above would show nothing."""
    directory = save(configs()["llama"], tmp_path)
    runner = make_runner(directory)
    [text] = texts((SWITCH_TOKENS + 1,))
    params = SamplingParams(max_tokens=ANSWER_TOKENS, ignore_eos=True)
    [right] = generate_unsplit(runner, [text], params)
    [rope] = [module for module in runner.model.modules() if isinstance(module, LengthRope)]
    rope.switch_tokens = runner.spec.context_tokens
    rope.rotary.config.rope_parameters["original_max_position_embeddings"] = 1000
    assert generate_unsplit(runner, [text], params) != [right]


def test_a_request_that_would_change_in_its_answer_is_refused(tmp_path: Path) -> None:
    runner = make_runner(save(configs()["phi3"], tmp_path))
    [text] = texts((SWITCH_TOKENS - 2,))
    generate_unsplit(runner, [text], SamplingParams(max_tokens=3, ignore_eos=True))
    with pytest.raises(
        PromptTooLongError, match="set max_tokens to at most 3, or send a prompt of more than 40"
    ):
        generate_unsplit(runner, [text], SamplingParams(max_tokens=4))
