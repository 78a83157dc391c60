"""Quantized KV through the whole system: values and scales arrive as they were written."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from architectures import HYBRIDS, save
from local_groups import Checkpoints, local_groups, random_prompts, small_config

from disagg.core.config.read import ModelConfig
from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource
from disagg.reference.answers import reference_answers

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


@pytest.mark.parametrize("peer_memory", [False, True])
@pytest.mark.parametrize(("kv_dtype", "tp"), [("int8", (2, 1)), ("float8_e4m3fn", (1, 2))])
def test_kv_that_is_quantized_on_its_way(
    kv_dtype: str, tp: tuple[int, int], peer_memory: bool, checkpoints: Checkpoints
) -> None:
    source = checkpoints.source("llama", 4)
    prompts = random_prompts(5, 61, 29, seed=1)
    sampling = SamplingParams(max_tokens=TOKENS)
    config = small_config(*tp, prefill_page=16, decode_page=1, peer_memory=peer_memory)
    config = msgspec.structs.replace(
        config,
        model=ModelConfig(path=str(source.directory)),
        decode=msgspec.structs.replace(config.decode, kv_dtype=kv_dtype),
    )
    expected = reference_answers(config, prompts, sampling, lambda: None)
    assert expected.name.startswith("our engine unsplit")
    with local_groups(config, source) as groups:
        layouts = [info.layout for info in (groups.prefill_info, groups.decode_info)]
        assert [layout.dtype for layout in layouts] == ["float32", kv_dtype]
        answers = groups.answers(prompts, sampling)
        written = sum(rank.statistics()["transfer"].segments_written for rank in groups.prefill)
        nbytes = sum(rank.statistics()["transfer"].bytes_sent for rank in groups.prefill)
    assert [answer.tokens for answer in answers] == expected.answers
    assert nbytes == sum(map(len, prompts)) * layouts[1].token_bytes
    assert (written > 0) == peer_memory


def test_a_recurrent_state_is_not_quantized_on_its_way(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Prompts so short that 8 bits of K and V do not matter, and the state does."""
    source = ModelSource.from_directory(save(HYBRIDS["lfm2"](), tmp_path))
    config = small_config(2, 1)
    config = msgspec.structs.replace(config, decode=msgspec.structs.replace(config.decode, kv_dtype="int8"))
    (prompt,) = random_prompts(30)
    with local_groups(config, source) as groups:
        (answer,) = groups.answers([prompt], SamplingParams(max_tokens=6))
        spec, decode = groups.prefill[0].runner.spec, groups.decode[0].runner.spec
    assert decode.layout.states == spec.layout.states
    assert answer.report.nbytes == 30 * decode.layout.token_bytes + spec.layout.state_bytes
    assert answer.tokens == checkpoints.greedy(source, prompt, 6)
