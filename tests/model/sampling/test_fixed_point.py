"""What is summed over a row has the same bits whatever other rows there are, and means what torch's floats mean."""

from __future__ import annotations

import pytest
import torch

from disagg.core.types import SamplingParams
from disagg.model.sampling.fixed_point import in_units, log_softmax, top
from disagg.model.sampling.next_tokens import BeamStep, SampledBeams, next_tokens
from disagg.model.sampling.penalties import SamplingRow, history_of

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
VOCAB = 1003
"""Odd, so that rows begin at addresses of every alignment."""


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0) -> torch.Tensor:
    """In steps of 1/8, as 16 bits have them: many are equal."""
    drawn = 3 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    return (8 * drawn).round() / 8


@pytest.mark.parametrize("device", DEVICES)
def test_log_softmax_is_torch_s_but_for_its_last_bits(device: str) -> None:
    logits = random_logits(5).to(device)
    logits[1, 3:900] = float("-inf")
    expected = torch.log_softmax(logits.double(), dim=-1)
    torch.testing.assert_close(log_softmax(logits).double(), expected, rtol=2e-7, atol=2e-7)
    assert log_softmax(torch.full((1, 4), float("-inf"), device=device)).isnan().all()


@pytest.mark.parametrize("vocab", [2, 1 << 17, (1 << 18) - 1, 1 << 18, 1 << 19])
def test_sums_of_any_vocabulary_fit(vocab: int) -> None:
    """Equal logits make the largest sum that there is."""
    units = in_units(torch.ones(1, vocab, dtype=torch.float64))
    total = int(units.sum())
    assert 0 < total == vocab * int(units[0, 0]) <= 1 << 62
    assert torch.equal(units.cumsum(dim=-1)[0, -1], units.sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("count", [1, 7, VOCAB])
def test_of_equal_values_the_lowest_index_is_first(count: int, device: str) -> None:
    values = random_logits(4)
    values[0, 5:9] = values.max() + 1
    values[1, ::3] = float("-inf")
    values[2, 11], values[2, 500], values[2, 700] = float("inf"), float("nan"), -float("nan")
    values[3] = torch.tensor([0.0, -0.0, -1.0, 1e-45])[torch.arange(VOCAB) % 4]
    found = top(values.to(device), count)
    expected = values.sort(dim=-1, descending=True, stable=True)
    assert torch.equal(found.indices.cpu(), expected.indices[:, :count])
    assert torch.equal(found.values.cpu().nan_to_num(), expected.values[:, :count].nan_to_num())


PARAMS = [
    SamplingParams(logprobs=5),
    SamplingParams(temperature=1.0, seed=1, logprobs=0),
    SamplingParams(temperature=0.7, top_k=20, seed=2),
    SamplingParams(temperature=1.3, top_p=0.9, seed=3, logprobs=20),
    SamplingParams(temperature=2.0, min_p=0.02, seed=4),
    SamplingParams(temperature=1.5, top_k=50, top_p=0.8, min_p=0.01, seed=5, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.2, logit_bias=((7, 2.5), (9, -1.0)), logprobs=3),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("others", [1, 7, 63])
def test_a_row_s_token_and_logprobs_do_not_depend_on_others(others: int, device: str) -> None:
    logits = random_logits(len(PARAMS) + others).to(device)
    every = [PARAMS[i % len(PARAMS)] for i in range(len(logits))]
    answer = [3, 7, 7, 11]

    def found(numbers: list[int]) -> list[object]:
        rows = [SamplingRow(every[i], answer, history_of([1, 2, 3], every[i])) for i in numbers]
        return list(next_tokens(logits[numbers], rows, (2,)))

    together = found(list(range(len(logits))))
    assert found(list(reversed(range(len(logits))))) == together[::-1]
    for number in range(len(PARAMS)):
        assert found([number]) == together[number : number + 1]
        assert found([len(logits) - 1, number])[1:] == together[number : number + 1]


@pytest.mark.parametrize("device", DEVICES)
def test_a_search_does_not_depend_on_others(device: str) -> None:
    logits = random_logits(12).to(device)
    step = BeamStep(SamplingParams(beams=3), [4], [-1.5, -1.5, -2.25])
    together = SampledBeams(logits, [step] * 4, (2,)).result()
    for number in range(4):
        alone = SampledBeams(logits[3 * number : 3 * number + 3], [step], (2,)).result()
        assert alone == [together[number]]


@pytest.mark.parametrize("device", DEVICES)
def test_bits_of_a_row_alone(device: str) -> None:
    logits = random_logits(65).to(device) * 1.37
    together = log_softmax(logits)
    for number in (0, 1, 31, 64):
        assert torch.equal(log_softmax(logits[number : number + 1].clone())[0], together[number])
