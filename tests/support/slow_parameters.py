"""Parameters of which `make test` runs a sample; the others are for `make test-slow`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def sampled(values: Iterable[Any], in_sample: Callable[..., bool]) -> list[Any]:
    """The `values` for `parametrize`, marked slow unless `in_sample`, which gets a tuple as its arguments."""
    cases = [value if isinstance(value, tuple) else (value,) for value in values]
    return [_parameters(case, in_sample(*case)) for case in cases]


def thinned(*axes: Sequence[Any], by: int) -> list[Any]:
    """All combinations for `parametrize`, of which the sample has one in `by`.

    If an axis has at least `by` values, the sample has each combination of values of the other axes.
    """
    places = itertools.product(*(range(len(axis)) for axis in axes))
    return [
        _parameters(case, sum(place) % by == 0)
        for place, case in zip(places, itertools.product(*axes), strict=True)
    ]


def _parameters(case: Sequence[Any], in_sample: bool) -> Any:
    return pytest.param(*case, marks=() if in_sample else pytest.mark.slow)
