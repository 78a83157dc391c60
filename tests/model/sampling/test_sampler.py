"""The sampler against transformers' own warpers: the tokens they allow, and how often each comes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from disagg.core.errors import RequestError
from disagg.core.types import SamplingParams
from disagg.model.sampling.next_tokens import next_tokens
from disagg.model.sampling.penalties import SamplingRow

VOCAB = 40


def random_logits(rows: int, seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


def sample(
    logits: torch.Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> list[int | RequestError]:
    """One token per row; `positions`: index of each token in its answer."""
    rows = [
        SamplingRow(p, (), None, ahead_tokens=position) for p, position in zip(params, positions, strict=True)
    ]
    return [one if isinstance(one, RequestError) else one.token for one in next_tokens(logits, rows, ())]


def plain_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What transformers' `generate()` draws from, `[vocab]`."""
    scores, ids = logits[None].clone(), torch.zeros(1, 1, dtype=torch.long)
    scores = TemperatureLogitsWarper(params.temperature)(ids, scores)
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(ids, scores)
    if params.top_p < 1.0:
        scores = TopPLogitsWarper(params.top_p)(ids, scores)
    if params.min_p:
        scores = MinPLogitsWarper(params.min_p)(ids, scores)
    return torch.softmax(scores, dim=-1)[0]


def test_greedy_is_argmax_with_its_ties() -> None:
    logits = random_logits(3)
    logits[1, 5] = logits[1, 9] = logits[1].max() + 1
    tokens = sample(logits, [SamplingParams()] * 3, [0, 1, 2])
    assert tokens == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize("temperature", [1e-3, 1e-37, 1e-40, 1e-300])
def test_almost_no_temperature_is_greedy(temperature: float) -> None:
    """Logits divided by it would be infinite in float32, and a draw among them the least likely token."""
    logits = 5 * random_logits(2)
    params = SamplingParams(temperature=temperature, seed=3)
    assert sample(logits, [params] * 2, [0, 1]) == logits.argmax(dim=-1).tolist()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.5, top_k=4),
        SamplingParams(temperature=1.7, top_p=0.6),
        SamplingParams(temperature=1.3, top_k=12, top_p=0.8),
        SamplingParams(temperature=1.0, top_k=500),
        SamplingParams(temperature=1.0, top_p=1e-6),
        SamplingParams(temperature=1.4, min_p=0.1),
        SamplingParams(temperature=1.0, min_p=1.0),
        SamplingParams(temperature=2.0, top_k=15, top_p=0.9, min_p=0.2),
    ],
)
@pytest.mark.parametrize("seed", [None, 11])
def test_draws_follow_the_distribution_of_transformers(params: SamplingParams, seed: int | None) -> None:
    """A chi-square test of 4,000 draws; the seeds are fixed, so it cannot fail by chance."""
    torch.manual_seed(1)
    count, logits = 4000, random_logits(1)
    logits[0, 3] = logits[0].sort().values[-4]  # a tie at the edge of top-k = 4: both stay
    drawn = msgspec.structs.replace(params, seed=seed)
    tokens = sample(logits.expand(count, VOCAB), [drawn] * count, range(count))
    counts, expected = Counter(tokens), plain_probabilities(logits[0], params) * count
    allowed = {token for token in range(VOCAB) if expected[token] > 0}
    assert set(counts) <= allowed
    often = [token for token in allowed if expected[token] >= 5]
    chi2 = sum((counts[t] - float(expected[t])) ** 2 / float(expected[t]) for t in often)
    assert chi2 < len(often) + 4 * (2 * len(often)) ** 0.5


def test_rows_with_different_params_do_not_disturb_each_other() -> None:
    logits = random_logits(5)
    params = [
        SamplingParams(),
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.7, top_k=2, seed=4),
        SamplingParams(temperature=2.0, top_p=0.5, seed=5),
        SamplingParams(temperature=2.0, min_p=0.3, seed=6),
    ]
    positions = [0, 7, 8, 9, 10]
    together = sample(logits, params, positions)
    alone = [sample(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(5)]
    assert together == alone
    assert sample(logits, params, positions) == together


def test_a_seed_fixes_each_position_and_positions_differ() -> None:
    logits = random_logits(1).expand(64, VOCAB)
    params = [SamplingParams(temperature=1.5, seed=-9)] * 64
    first = sample(logits, params, range(64))
    torch.manual_seed(99)
    assert sample(logits, params, range(64)) == first
    assert len(set(first)) > 5
    assert sample(logits, params, range(100, 164)) != first


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_end_their_row_only(bad: float, temperature: float) -> None:
    logits = random_logits(3)
    params = [SamplingParams(temperature=temperature, seed=1)] * 3
    good = sample(logits, params, [0, 1, 2])
    logits[1, 17] = bad
    found = sample(logits, params, [0, 1, 2])
    assert isinstance(found[1], RequestError)
    assert "row 1" in str(found[1])
    assert [found[0], found[2]] == [good[0], good[2]]


def test_a_row_of_minus_infinity_is_an_error_and_lengths_must_match() -> None:
    assert isinstance(sample(torch.full((1, 4), float("-inf")), [SamplingParams()], [0])[0], RequestError)
    with pytest.raises(ValueError, match="logits must be"):
        sample(random_logits(2), [SamplingParams()], [0])
