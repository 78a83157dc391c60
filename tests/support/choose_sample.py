"""Writes `tests/slow_variants.txt`: the variants of costly tests that `make test` leaves to `make test-slow`.

`make sample` runs the tests of `make test`, and the variants listed before, with `sample_recorder.py`. The sample
keeps all light tests. Of the costly ones it keeps, greedily by branches per CPU second, tests that together take
every branch of the product that a costly test takes and no light one does. Each test function keeps a variant.
"""

from __future__ import annotations

import heapq
import sqlite3
import sys
from collections import defaultdict
from pathlib import Path

from sample_recorder import COSTLY_S, FOLDER, LIGHT, costs_s
from variants import LIST, function_of

HEADING = """\
# Variants of tests that `make test` leaves to `make test-slow`, written by `make sample`. The variants that remain
# take the same branches of the product, and each test function has one.
"""

INTERPRETED = (
    "tests/bench/kernels/",
    "tests/kernels/",
    "tests/model/attention/test_attention_kernels.py",
    "tests/model/experts/test_grouped_experts.py",
    "tests/model/experts/test_quantized_forward.py",
    "tests/model/recurrent/test_packed_steps.py",
)
"""Tests that also run with interpreted kernels, whose branches are not recorded: all stay in the sample."""
COMBINATIONS = (
    "tests/nodes/test_interleav",
    "tests/router/test_session.py",
    "tests/staging/",
    "tests/system/test_cluster_simulation.py",
    "tests/system/test_exact_matrix.py",
)
"""Tests about orders of events, or pairs of group sizes. Their variants take the same branches, and find different
bugs: all stay in the sample."""
COMPILED = "_code.py"
"""End of the files in `INTERPRETED` that only compile kernels."""

Branches = dict[str, set[tuple[str, int, int]]]


def stays(test: str) -> bool:
    """Returns whether the test stays in the sample whatever it costs."""
    if test.startswith(COMBINATIONS):
        return True
    return test.startswith(INTERPRETED) and not test.split("::", 1)[0].endswith(COMPILED)


def recorded(folder: Path) -> Branches:
    """Returns the branches of each context: file, line before, line behind."""
    found: Branches = defaultdict(set)
    for file in folder.glob("branches.*"):
        with sqlite3.connect(file) as data:
            rows = data.execute(
                "select context.context, file.path, arc.fromno, arc.tono from arc"
                " join context on context.id = arc.context_id join file on file.id = arc.file_id"
            )
            for test, path, before, behind in rows:
                found[test].add((path, before, behind))
    return found


def chosen(branches: Branches, cost_s: dict[str, float]) -> set[str]:
    """Returns costly tests that together take every branch of costly tests that no light test takes.

    Greedy set cover: the next test takes the most branches per CPU second that no chosen test takes. A heap with
    outdated entries is enough, because what a test adds only shrinks.
    """
    light = branches.get(LIGHT, set())
    added = {test: taken - light for test, taken in branches.items() if test != LIGHT}
    left = set[tuple[str, int, int]]().union(*added.values())
    heap = [(-len(more) / cost_s[test], test) for test, more in added.items()]
    heapq.heapify(heap)
    found = set()
    while left:
        _, test = heapq.heappop(heap)
        rate = -len(added[test] & left) / cost_s[test]
        if heap and rate > heap[0][0]:
            heapq.heappush(heap, (rate, test))
            continue
        found.add(test)
        left -= added[test]
    return found


def slow_variants(branches: Branches, cost_s: dict[str, float]) -> list[str]:
    """Returns the costly tests that leave the sample."""
    kept = chosen(branches, cost_s)
    costly = {test for test in branches if cost_s.get(test, 0.0) >= COSTLY_S and not stays(test)}
    stay = {test for test, cost in cost_s.items() if cost < COSTLY_S or stays(test)}
    functions = {function_of(test) for test in stay | kept}
    for test in sorted(costly, key=lambda test: (cost_s[test], test)):
        if function_of(test) not in functions:
            functions.add(function_of(test))
            kept.add(test)
    return sorted(costly - kept)


def main() -> None:
    """Writes the list."""
    cost_s = costs_s(FOLDER)
    slow = slow_variants(recorded(FOLDER), cost_s)
    LIST.write_text(HEADING + "".join(f"{test}\n" for test in slow))
    left_s, all_s = sum(cost_s[test] for test in slow), sum(cost_s.values())
    sys.stdout.write(f"{len(slow)} variants, {left_s:.0f} of {all_s:.0f} CPU s\n")


if __name__ == "__main__":
    main()
