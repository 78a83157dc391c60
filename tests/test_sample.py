"""Tests of the choice of variants for `make test`, and of the list of the others."""

from __future__ import annotations

import pytest
from choose_sample import chosen, slow_variants
from sample_recorder import LIGHT
from variants import COLLECTED, IN_SAMPLE, LIST, SLOW_VARIANTS, function_of


def taken(*lines: int) -> set[tuple[str, int, int]]:
    return {("file", line, line + 1) for line in lines}


def test_every_branch_is_taken_by_the_cheapest_tests() -> None:
    branches = {
        LIGHT: taken(1),
        "a[1]": taken(1, 2, 3),
        "a[2]": taken(2, 3),
        "b[1]": taken(3, 4),
        "b[2]": taken(4),
    }
    cost_s = {"a[1]": 5.0, "a[2]": 2.0, "b[1]": 4.0, "b[2]": 1.0, "light": 0.1}
    assert chosen(branches, cost_s) == {"a[2]", "b[2]"}
    assert slow_variants(branches, cost_s) == ["a[1]", "b[1]"]


def test_each_function_keeps_its_cheapest_variant() -> None:
    branches = {LIGHT: taken(1), "a[1]": taken(1), "a[2]": taken(1), "b": taken(1), "c[1]": taken(1)}
    cost_s = {"a[1]": 5.0, "a[2]": 2.0, "b": 9.0, "c[1]": 3.0, "c[2]": 0.01}
    assert slow_variants(branches, cost_s) == ["a[1]", "c[1]"], "c has a light variant"


@pytest.mark.parametrize("file", ["tests/kernels/copy/test_x.py", "tests/staging/test_moves.py"])
def test_tests_that_are_interpreted_too_and_combinations_stay(file: str) -> None:
    names = [f"{file}::t[1]", f"{file}::t[2]"]
    assert (
        slow_variants({LIGHT: taken(1), **{name: taken(1) for name in names}}, dict.fromkeys(names, 9.0))
        == []
    )


def test_the_list_names_tests_whose_functions_keep_a_variant(request: pytest.FixtureRequest) -> None:
    """Checks the files that were collected: all of them in `make test`."""
    if any("::" in argument for argument in request.config.args):
        pytest.skip("collects parts of files")
    files = {test.split("::", 1)[0] for test in COLLECTED}
    listed = {test for test in SLOW_VARIANTS if test.split("::", 1)[0] in files}
    assert listed <= COLLECTED, f"no such tests: remove them from {LIST.name}, or run `make sample`"
    kept = {function_of(test) for test in IN_SAMPLE}
    assert {function_of(test) for test in listed} <= kept, "a function has no variant in `make test`"
    assert all((LIST.parents[1] / test.split("::", 1)[0]).is_file() for test in SLOW_VARIANTS)
