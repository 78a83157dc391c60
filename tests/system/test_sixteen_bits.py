"""In 16 bits: tokens that rounding decides are no failure, and KV that arrives wrong still is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from local_groups import Checkpoints, local_groups, random_prompts, small_config

from decode_node import landing
from disagg.core.config.read import Config, ModelConfig
from disagg.core.errors import MismatchError
from disagg.core.sampling import MAX_LOGPROBS
from disagg.core.types import SamplingParams, Span
from disagg.model.rounding import Judged
from disagg.reference.answers import equal_tokens, reference_answers
from disagg.reference.verdict import judged_of, verdict, within
from kernels.copy.checksum import Check

TOLD = SamplingParams(max_tokens=16, logprobs=MAX_LOGPROBS)
PROMPTS = random_prompts(5, 61, 29, 90, 44, 17, seed=1)
Found = dict[str, list[Judged] | None]
Fault = Callable[[torch.Tensor, torch.Tensor, Span, Span], None]
"""`fault(pool, slots, layers, heads)` damages rows that were scattered to the pool."""


def config_of(checkpoints: Checkpoints, dtype: str, **changes: Any) -> Config:
    source = checkpoints.source("llama", 4)
    model = ModelConfig(path=str(source.directory), dtype=dtype, **changes)  # type: ignore[arg-type]
    return msgspec.structs.replace(small_config(2, 1), model=model)


def compared(config: Config, checkpoints: Checkpoints) -> tuple[Found, str]:
    """The split system, two ranks and one, against one engine; each answer's name with its positions."""
    assert not equal_tokens(config)
    with local_groups(config, checkpoints.source("llama", 4)) as groups:
        answers = groups.answers(PROMPTS, TOLD)
    reference = reference_answers(config, PROMPTS, TOLD, lambda: None, [one.logprobs for one in answers])
    triples = zip(answers, reference.answers, reference.judges, strict=True)
    found = {f"r{i}": judged_of(a.tokens, a.logprobs, right, j) for i, (a, right, j) in enumerate(triples)}
    return found, reference.name


@pytest.mark.parametrize("kv_dtype", ["auto", "float8_e4m3fn"])
def test_what_rounding_decides_is_said_and_no_failure(checkpoints: Checkpoints, kv_dtype: str) -> None:
    """Each of two ranks rounds its part of a sum. By Hugging Face, and, which lacks it, quantized, by our engine."""
    found, name = compared(config_of(checkpoints, "bfloat16", kv_dtype=kv_dtype), checkpoints)
    assert name.startswith("Hugging Face" if kv_dtype == "auto" else "our engine")
    differ = [judged for judged in found.values() if judged is not None]
    assert differ, "nothing rounds otherwise here: the test shows nothing"
    assert all(len(judged) == TOLD.max_tokens and within(judged) for judged in differ)
    said = verdict(found, 96, name)
    assert f"{len(differ)} of 6 answers differ" in said
    assert "only where rounding decides" in said


def _lose_a_head(pool: torch.Tensor, slots: torch.Tensor, layers: Span, heads: Span) -> None:
    """Zeroes the values of one KV head, in one layer."""
    pool[1, 1, slots.long(), 0] = 0


def _negate(pool: torch.Tensor, slots: torch.Tensor, layers: Span, heads: Span) -> None:
    """Negates K of the first layer."""
    if layers.start == 0:
        own = pool[0, 0, :, heads.start : heads.stop]
        own[slots.long()] = -own[slots.long()]


@pytest.mark.parametrize("fault", [_lose_a_head, _negate])
def test_kv_that_arrives_wrong_is_a_failure(
    fault: Fault, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = landing.scatter

    def scatter(
        source: torch.Tensor,
        pool: torch.Tensor,
        slots: torch.Tensor,
        layers: Span,
        heads: Span,
        check: Check | None,
    ) -> None:
        real(source, pool, slots, layers, heads, check)
        fault(pool, slots, layers, heads)

    monkeypatch.setattr(landing, "scatter", scatter)
    found, name = compared(config_of(checkpoints, "bfloat16"), checkpoints)
    said = r"of 6 answers differ from .*; r\d: token \d+ is \d+.*rounding explains"
    with pytest.raises(MismatchError, match=said):
        verdict(found, 96, name)


def test_an_answer_that_ends_too_early_is_not_judged(checkpoints: Checkpoints) -> None:
    config = config_of(checkpoints, "bfloat16")
    with local_groups(config, checkpoints.source("llama", 4)) as groups:
        (answer,) = groups.answers(PROMPTS[:1], TOLD)
    (judge,) = reference_answers(config, PROMPTS[:1], TOLD, lambda: None, [answer.logprobs[:3]]).judges
    assert judge is None
    with pytest.raises(MismatchError, match=r"1 of 1 answers differ from x: r0$"):
        verdict({"r0": judged_of(answer.tokens[:3], answer.logprobs[:3], answer.tokens, judge)}, 3, "x")


def test_where_tokens_must_be_equal(checkpoints: Checkpoints) -> None:
    assert equal_tokens(config_of(checkpoints, "float32"))
    assert equal_tokens(config_of(checkpoints, "float32", kv_dtype="int8"))
    quantized = config_of(checkpoints, "bfloat16", kv_dtype="int8", deterministic=True)
    assert not equal_tokens(quantized), "two ranks round otherwise than one"
    alone = msgspec.structs.replace(small_config(1, 1), model=quantized.model)
    assert equal_tokens(alone)
    by_hugging_face = config_of(checkpoints, "bfloat16", deterministic=True).model
    assert not equal_tokens(msgspec.structs.replace(alone, model=by_hugging_face)), "other kernels"
