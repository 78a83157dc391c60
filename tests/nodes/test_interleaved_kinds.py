"""Quantized KV, wire probes, mixed requests and moved prompts in every order of events (see `interleaved_runs`).

`make test` runs few seeds of each kind of trouble that no other kind contains, `make test-slow` all the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from interleaved_runs import ENDS, ends_of, run_seeds
from slow_parameters import sampled

from prefill_node.probe import Probed


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "more"])
@pytest.mark.parametrize(
    "what",
    sampled(
        ["nothing", "abort and fail", "death", "crowded abort", "damage abort", "damage fail"],
        lambda what: what not in ("nothing", "damage abort"),
    ),
)
def test_kv_that_is_quantized_on_its_way_in_any_order(what: str, more: bool) -> None:
    """Quantized values arrive, are shared, swapped out and in, beside floats that are computed: all are exact."""
    first, count = ((2,), 3) if "crowded" in what else ((3, 12), 13)
    if what == "death":
        first = (3, 4, 12)  # in the others no request is done
    seeds = [seed for seed in range(count) if seed not in first] if more else first
    ends = ends_of(run_seeds(seeds, what, kv_dtype="int8"))
    assert "done" in ends
    assert ends <= ENDS[what.removeprefix("damage ")]


@pytest.mark.parametrize(
    "seeds", [range(6, 9), pytest.param(range(9, 12), marks=pytest.mark.slow)], ids=["first", "more"]
)
@pytest.mark.parametrize(
    "what",
    sampled(
        ["nothing", "fail", "messages fail", "abort fail death", "fence", "silence"],
        lambda what: what not in ("nothing", "fail"),
    ),
)
def test_wires_are_timed_in_any_order(what: str, seeds: range) -> None:
    """Requests beside probes stay exact, whatever happens to either, and a probe leaves nothing behind."""
    probed: list[Probed] = []
    run_seeds(seeds, what, probed)
    assert any(one.wire for one in probed), "some probes succeeded"
    assert any(one.why for one in probed), "some probes failed"


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["first", "more"])
@pytest.mark.parametrize(
    "what",
    sampled(
        [
            "nothing",
            "abort fail death",
            "damage abort and fail",
            "crowded abort",
            "tiers back abort",
            "tiers back death",
            "tiers storage abort",
            "tiers back storage",
        ],
        lambda what: what not in ("nothing", "tiers back abort", "tiers storage abort"),
    ),
)
def test_requests_with_priorities_grammars_and_scores_in_any_order(what: str, more: bool) -> None:
    """Scored prompts read no cache, constrained ones wait for their grammar, urgent ones overtake both."""
    long = "crowded" in what or "storage" in what
    first, count = (1, 6) if long else (2, 30)
    seeds = range(first, count) if more else range(first)
    ends = ends_of(run_seeds(seeds, f"mixed {what}"))
    assert "done" in ends or not more
    assert ends <= ENDS[what.removeprefix("damage ")]


@pytest.mark.parametrize(
    ("what", "seeds"),
    [
        ("nothing", (3, 7, 14)),
        ("abort and fail", (7, 11)),
        ("death", (15, 29)),
        ("deadline", (1, 3)),
        ("tiers", (3, 4)),
        ("words", (7,)),
        ("damage", (3, 14)),
        *(
            pytest.param(what, range(100), marks=pytest.mark.slow)
            for what in ("nothing", "abort and fail", "death", "tiers", "words", "damage", "mixed")
        ),
        pytest.param("crowded abort", range(20), marks=pytest.mark.slow),
    ],
)
def test_both_groups_compute_a_prompt_in_any_order(what: str, seeds: Iterable[int]) -> None:
    """The decode group computes the tails of prompts while their heads arrive, or after. All answers are exact, and
    both groups free what they held, also if the step goes on without KV that is missing."""
    requests = run_seeds(seeds, f"{what} split")
    assert ends_of(requests) <= ENDS.get(what, {"done"}) | {"transport"}
    assert any(one.waited for one in requests)
    assert "death" in what or any(one.waited and one.ended == "done" for one in requests)


@pytest.mark.parametrize(
    ("what", "seeds"),
    [
        ("nothing", (4, 5)),
        ("abort and fail", (1, 2, 11)),
        ("death", (10,)),
        ("deadline", (4,)),
        ("crowded abort", (4,)),
        *(
            pytest.param(what, range(first, 13), marks=pytest.mark.slow)
            for what, first in (("nothing", 6), ("fail", 0), ("host", 0), ("repeat", 0))
        ),
        pytest.param("crowded", range(8), marks=pytest.mark.slow),
    ],
)
def test_prompts_move_in_any_order(what: str, seeds: Iterable[int]) -> None:
    """The decode group has most prompts, in its queue or half computed, when some of them move. All answers are
    exact, and both groups free what they held."""
    requests = run_seeds(seeds, f"{what} local")
    assert ends_of(requests) <= ENDS[what]
    assert any(one.moved and one.ended == "done" for one in requests)
