"""Marks the variants that `tests/slow_variants.txt` lists, and keeps the names of all collected tests."""

from __future__ import annotations

from pathlib import Path

import pytest

LIST = Path(__file__).parents[1] / "slow_variants.txt"
SLOW_VARIANTS = frozenset(line for line in LIST.read_text().splitlines() if not line.startswith("#"))
COLLECTED: set[str] = set()
"""Names of all collected tests, with those that `-m` or `-k` deselects."""
IN_SAMPLE: set[str] = set()
"""Names of the collected tests that are neither slow nor need a GPU."""


def function_of(test: str) -> str:
    """Returns a test's name without its parameters."""
    return test.split("[", 1)[0]


def mark(item: pytest.Item) -> None:
    """Marks a collected test as slow if the list has it."""
    if item.nodeid in SLOW_VARIANTS:
        item.add_marker(pytest.mark.slow)
        item.add_marker(pytest.mark.variant)
    COLLECTED.add(item.nodeid)
    if not any(item.iter_markers("slow")) and not any(item.iter_markers("gpu")):
        IN_SAMPLE.add(item.nodeid)
