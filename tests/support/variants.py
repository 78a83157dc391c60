"""The variants of `tests/slow_variants.txt`, which `make sample` writes, and the tests of this session."""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "slow_variants.txt"
SLOW_VARIANTS = frozenset(line for line in LIST.read_text().splitlines() if not line.startswith("#"))
COLLECTED: set[str] = set()
"""All tests of the collected files, also deselected ones."""
IN_SAMPLE: set[str] = set()
"""Those of them that `make test` runs."""


def function_of(test: str) -> str:
    """Returns a test's name without its parameters."""
    return test.split("[", 1)[0]


def mark(item: pytest.Item) -> None:
    """Marks a collected variant that is not in the sample of `make test`."""
    if item.nodeid in SLOW_VARIANTS:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.variant)
    COLLECTED.add(item.nodeid)
    if not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu")):
        IN_SAMPLE.add(item.nodeid)
