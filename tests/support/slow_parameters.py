"""Parameters of which `make test` runs a sample; the others are for `make test-slow`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], in_sample: Callable[..., bool]) -> list[Any]:
    """The `values` for `parametrize`, marked slow unless `in_sample`, which gets a tuple as its arguments."""
    found = []
    for value in values:
        arguments = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*arguments, marks=() if in_sample(*arguments) else pytest.mark.slow))
    return found
