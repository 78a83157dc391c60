"""The arithmetic of the comparison in 16 bits, and the noise that it is measured with."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from disagg.core.errors import MismatchError
from disagg.core.types import TokenLogprobs
from disagg.model.rounding import (
    Judge,
    compared_tokens,
    judge_answer,
    judge_by,
    output_noise,
    view_of,
    worst_of,
)
from disagg.reference.verdict import judged_of, verdict, within

LOGPROBS = TokenLogprobs(5, -1.0, ((5, -1.0), (7, -1.1)))
"""Token 5, only just."""


def judged_with(logprobs: TokenLogprobs, view: tuple[float, ...], noise: float, best: int = 7) -> bool:
    judge = Judge([best], [view], [tuple(one + noise for one in view)])
    (found,) = judge_answer([logprobs], judge)
    assert (found.position, found.token, found.best) == (0, logprobs.token, best)
    assert found.explained == pytest.approx(noise)
    return found.within


def test_a_difference_is_explained_by_as_much_noise() -> None:
    view = (-1.1, -1.1, -1.0, -1.0)  # of 5, which was chosen, 5, 7, and the likeliest here, 7
    assert judged_with(LOGPROBS, view, noise=0.11)
    assert not judged_with(LOGPROBS, view, noise=0.09), "off by 0.1"


def test_what_is_chosen_must_be_nearly_the_likeliest_for_both() -> None:
    """Another token than either engine's likeliest is no rounding, however well the log-probabilities agree."""
    logprobs = TokenLogprobs(5, -3.0, ((7, -1.0), (5, -3.0)))
    assert not judged_with(logprobs, (-3.0, -1.0, -3.0, -1.0), noise=0.5)
    assert not judged_with(LOGPROBS, (-1.0, -1.0, -1.1, -0.1), noise=0.4, best=9), "9 has no log-probability"


def test_nan_is_never_explained() -> None:
    nan = math.nan
    assert not judged_with(TokenLogprobs(5, nan, ((5, nan),)), (-1.0, -1.0, -1.0), noise=9.0)
    judge = Judge([7], [(nan,) * 4], [(nan,) * 4])
    assert not judge_answer([LOGPROBS], judge)[0].within


def test_the_noise_of_an_answer_is_shared_by_its_positions() -> None:
    """One that has little noise by chance is not judged by that alone."""
    view = (-1.05, -1.05, -1.05, -1.05)
    judge = Judge([7, 7], [view, view], [view, tuple(one + 0.1 for one in view)])
    first, second = judge_answer([LOGPROBS, LOGPROBS], judge)
    assert first.explained == pytest.approx(0.1 / math.sqrt(2))
    assert second.explained == pytest.approx(0.1)
    assert worst_of([first, second]) is first


def test_verdicts() -> None:
    judge = Judge([7], [(-1.1, -1.1, -1.0, -1.0)], [(-1.3, -1.3, -1.2, -1.2)])
    differs = judged_of([5], [LOGPROBS], [7], judge)
    assert judged_of([5], [LOGPROBS], [5], judge) is None
    assert within(differs)
    assert not within(None)
    assert verdict({"a": None}, 3, "x") == "[green]every one of 3 tokens equals x[/green]"
    said = verdict({"a": None, "b": differs}, 4, "x")
    assert "1 of 2 answers differ from x, only where rounding decides" in said
    assert "1 of their 1 tokens are not its likeliest" in said
    wrong = judged_of([5], [LOGPROBS], [7], judge._replace(noisy=judge.views))
    with pytest.raises(
        MismatchError, match=r"1 of 3 answers differ from x: c; c: token 1 is 5, not 7: .* 0.1 "
    ):
        verdict({"a": None, "b": differs, "c": wrong}, 4, "x")


def test_noise_is_a_unit_of_each_module_s_result_and_goes_again() -> None:
    model = nn.Sequential(nn.Embedding(9, 512), nn.Linear(512, 40, dtype=torch.float32))
    ids = torch.tensor([1, 2, 3])

    def logits() -> torch.Tensor:
        return model(ids).detach()

    plain = logits()
    with output_noise(model, torch.bfloat16):
        off = (logits() - plain) / plain
        assert not torch.equal(logits(), plain + off * plain), "noise is new each time"
    assert off.std() == pytest.approx(2**-7 * math.sqrt(2), rel=0.2), (
        "of the layer, and of the model around it"
    )
    assert torch.equal(logits(), plain)
    judge = judge_by([model], torch.bfloat16, lambda: iter(logits()), [[5], [], [0, 1]])
    assert judge.best == plain.argmax(dim=-1).tolist()
    assert judge.views == [
        view_of(row, [*compared, best])
        for row, compared, best in zip(plain, [[5], [], [0, 1]], judge.best, strict=True)
    ]
    assert all(a != b for a, b in zip(judge.views, judge.noisy, strict=True))
    assert compared_tokens(LOGPROBS) == [5, 5, 7]
