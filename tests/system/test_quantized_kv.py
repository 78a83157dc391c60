"""Quantized KV through the whole system: codes and scales arrive as they were written."""

from __future__ import annotations

import msgspec
import pytest
from local_groups import Checkpoints, local_groups, random_prompts, small_config

from disagg.core.config import ModelConfig
from disagg.core.types import SamplingParams
from disagg.reference import reference_answers

TOKENS = 6


@pytest.mark.parametrize(("kv_dtype", "tp"), [("int8", (1, 1)), ("int8", (2, 1)), ("float8_e4m3fn", (1, 3))])
def test_split_over_two_groups_answers_are_those_of_one_engine(
    kv_dtype: str, tp: tuple[int, int], checkpoints: Checkpoints
) -> None:
    source = checkpoints.source("llama", 4)
    prompts = random_prompts(5, 61, 29, seed=1)
    sampling = SamplingParams(max_tokens=TOKENS)
    model = ModelConfig(path=str(source.directory), kv_dtype=kv_dtype)  # type: ignore[arg-type]
    config = msgspec.structs.replace(small_config(*tp, prefill_page=16, decode_page=1), model=model)
    expected = reference_answers(config, prompts, sampling, lambda: None)
    assert expected.name.startswith("our engine unsplit")
    with local_groups(config, source) as groups:
        assert groups.prefill[0].runner.spec.layout.dtype == kv_dtype
        assert groups.prefill[0].runner.pool.buffer.element_size() == 1
        answers = groups.answers(prompts, sampling)
    assert [answer.tokens for answer in answers] == expected.answers
