"""The mean rate of operations: tokens count alike, late ones more, and small operations not at all."""

from __future__ import annotations

import pytest

from disagg.kv.token_rate import HALF_LIFE_TOKENS, LEAST_TOKENS, TokenRate


def test_a_rate_follows_the_operations() -> None:
    rate = TokenRate()
    assert rate.tokens_per_s == 0.0
    rate.add(1000, 2.0)
    assert rate.tokens_per_s == 500.0
    for _ in range(1000):
        rate.add(1024, 1.0)
        rate.check()
    assert rate.tokens_per_s == pytest.approx(1024.0)


def test_half_of_the_weight_is_lost_with_later_tokens() -> None:
    rate = TokenRate()
    rate.add(HALF_LIFE_TOKENS, 1.0)
    rate.add(HALF_LIFE_TOKENS, 3.0)
    assert rate.tokens_per_s == pytest.approx(1.5 * HALF_LIFE_TOKENS / 3.5)


def test_the_size_of_operations_does_not_matter() -> None:
    one, other = TokenRate(), TokenRate()
    for _ in range(512):
        one.add(512, 0.25)
        other.add(1024, 0.5)
    assert one.tokens_per_s == pytest.approx(other.tokens_per_s)


@pytest.mark.parametrize(("tokens", "seconds"), [(LEAST_TOKENS - 1, 1.0), (1000, 0.0), (0, 5.0)])
def test_fixed_costs_and_unmeasured_times_do_not_count(tokens: int, seconds: float) -> None:
    rate = TokenRate()
    rate.add(tokens, seconds)
    assert rate.tokens_per_s == 0.0
    rate.add(640, 1.0)
    rate.add(tokens, seconds)
    assert rate.tokens_per_s == 640.0
