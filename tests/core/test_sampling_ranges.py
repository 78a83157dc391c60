"""Which sampling parameters are refused, and in which words."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from disagg.core.errors import InvalidRequestError, error_from_code
from disagg.core.sampling import check_sampling, ending_tokens, ends_answer
from disagg.core.types import SamplingParams

NAN, INF = float("nan"), float("inf")
EDGES: list[dict[str, Any]] = [
    {},
    {"min_tokens": 16, "min_p": 1.0, "top_p": 1e-9},
    {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.01},
    {"logit_bias": ((0, -100.0), (9, 100)), "stop_token_ids": (9,)},
    {"logprobs": 0, "seed": -(2**63), "top_k": 2**63 - 1},
    {"logprobs": 20, "seed": 2**63 - 1},
]
BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 0}, "max_tokens = 0 is not allowed; it must be at least 1"),
    ({"temperature": NAN}, "temperature = nan is not allowed; it must be 0"),
    ({"temperature": INF}, "temperature = inf"),
    ({"min_tokens": -1}, "min_tokens = -1 is not allowed; it must be 0 to max_tokens, 16"),
    ({"min_tokens": 17}, "min_tokens = 17"),
    ({"min_p": -0.1}, "min_p = -0.1"),
    ({"min_p": NAN}, "min_p = nan"),
    ({"presence_penalty": 2.1}, "presence_penalty = 2.1 is not allowed; it must be -2 to 2"),
    ({"frequency_penalty": NAN}, "frequency_penalty = nan"),
    ({"repetition_penalty": 0.0}, "repetition_penalty = 0.0 is not allowed; it must be from 1e-30 to 1e30"),
    ({"repetition_penalty": 1e-320}, "repetition_penalty = 1e-320"),
    ({"repetition_penalty": INF}, "repetition_penalty = inf"),
    ({"top_k": -1}, "top_k = -1 is not allowed; it must be 0"),
    ({"top_k": 2**70}, "top_k = 1180591620717411303424"),
    ({"logprobs": 21}, "logprobs = 21 is not allowed; it must be 0 to 20"),
    ({"logprobs": -1}, "logprobs = -1"),
    ({"seed": 2**63}, "seed = 9223372036854775808"),
    ({"logit_bias": ((5, 101.0),)}, "logit_bias of token 5 = 101.0 is not allowed; it must be -100 to 100"),
    ({"logit_bias": ((5, NAN),)}, "logit_bias of token 5 = nan"),
    ({"logit_bias": ((5, 1.0), (10, 1.0))}, "logit_bias has token 10, .* 0 to 9, the model's vocabulary"),
    ({"stop_token_ids": (-1,)}, "stop_token_ids has token -1"),
    (
        {"stop_token_ids": tuple(range(10)), "min_tokens": 1},
        "min_tokens = 1 .* each of the model's 10 tokens ends",
    ),
]


@pytest.mark.parametrize("values", EDGES)
def test_edges_are_allowed(values: dict[str, Any]) -> None:
    check_sampling(SamplingParams(**values), 10)


@pytest.mark.parametrize(("values", "what"), BAD)
def test_what_is_out_of_range_is_named_with_its_range(values: dict[str, Any], what: str) -> None:
    with pytest.raises(InvalidRequestError, match=what) as error:
        check_sampling(SamplingParams(**values), 10)
    assert error.value.param in values


def test_end_tokens_of_the_model_count_unless_they_are_ignored() -> None:
    sampling = SamplingParams(stop_token_ids=tuple(range(9)), min_tokens=2)
    check_sampling(sampling, 10)
    with pytest.raises(InvalidRequestError, match="min_tokens = 2 is not allowed"):
        check_sampling(sampling, 10, (9, 12))
    check_sampling(msgspec.structs.replace(sampling, ignore_eos=True), 10, (9, 12))
    check_sampling(msgspec.structs.replace(sampling, min_tokens=0), 10, (9, 12))


def test_without_a_vocabulary_tokens_are_only_not_negative() -> None:
    check_sampling(SamplingParams(stop_token_ids=(10**9,), logit_bias=((10**9, 1.0),)))
    with pytest.raises(InvalidRequestError, match="it must be 0 or more"):
        check_sampling(SamplingParams(logit_bias=((-1, 1.0),)))


def test_the_error_crosses_the_wire() -> None:
    assert isinstance(error_from_code("invalid_request", "why"), InvalidRequestError)


def test_tokens_that_end_an_answer() -> None:
    assert ending_tokens(SamplingParams(stop_token_ids=(4,)), (1, 2)) == (4, 1, 2)
    assert ending_tokens(SamplingParams(stop_token_ids=(4,), ignore_eos=True), (1, 2)) == (4,)
    for sampling in (SamplingParams(stop_token_ids=(4,), ignore_eos=ignores) for ignores in (False, True)):
        ending = [token for token in range(6) if ends_answer(token, sampling, (1, 2))]
        assert ending == sorted(ending_tokens(sampling, (1, 2)))
