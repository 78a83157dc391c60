"""Parameters of which `make test` runs a sample; the others are for `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def sampled(values: Iterable[Any], in_sample: Callable[..., bool]) -> list[Any]:
    """The `values` for `parametrize`, marked slow unless `in_sample`, which gets a tuple as its arguments."""
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*arguments, marks=() if in_sample(*arguments) else pytest.mark.slow))
    return found


def thinned(*axes: Sequence[Any], by: int) -> list[Any]:
    """All combinations for `parametrize`, of which the sample has one in `by`.

    If an axis has at least `by` values, the sample has each combination of values of the other axes.
    """
    combinations = itertools.product(*(enumerate(axis) for axis in axes))
    chosen = [(sum(place for place, _ in one) % by == 0, [value for _, value in one]) for one in combinations]
    return [pytest.param(*values, marks=() if kept else pytest.mark.slow) for kept, values in chosen]
