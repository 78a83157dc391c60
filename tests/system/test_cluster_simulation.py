"""A whole cluster with faults, by seeds: real routers, leaders, ranks and control channels (`cluster_simulation`).

Groups and routers die, hang and pause; packets are lost, repeated, late; the network is cut and healed. Whatever
happens, finished answers are exact, every request ends, and in the end nothing of any request is left. A failing seed
prints itself and the last events.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest
from cluster_simulation.bugs import BUGS, break_a_suspected_group
from cluster_simulation.faults import Faults
from cluster_simulation.run import Run, simulate
from cluster_simulation.scale import PEER_TIMEOUT_S, Scale
from slow_parameters import sampled

ALL, AT_ONCE = 10_000, 25
"""Seeds of `make test-slow`, and of one test."""
STATES_AT_ONCE = 5
FEATURES_AT_ONCE = 10
# fmt: off
CHOSEN = (
    25, 26, 27, 28, 29, 30, 31, 32, 35, 41, 43, 50, 51, 52, 53, 54, 55, 56, 57, 60, 63, 73, 74, 75, 76,
    77, 81, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 112, 125, 128, 143, 147, 161, 163, 164,
    183, 187, 188, 196, 198,
)
# fmt: on
"""Seeds that take, together with the first ones, every branch of the product that the first 200 seeds take."""
BUG_SEEDS = {
    "never resend": 8,
    "deliver twice": 6,
    "miss a lost peer": 7,
    "drop a recovery": 3,
    "go on from a wrong token": 17,
}
"""The first seed that finds the bug, if another one than 0."""
KINDS = sorted(set(Faults.KINDS))
FIRST_FAULTS = dict(enumerate(KINDS))
"""By the place of a seed among `AT_ONCE`: some have one more fault, so that every kind strikes."""
LARGE = Scale(
    prefills=25,
    decodes=25,
    routers=3,
    most_ranks=2,
    requests=1000,
    longest_answer=4,
    spread_s=60.0,
    faults=20,
    least=1.0,
)


def outcomes(runs: list[Run]) -> Counter[str]:
    """How often each outcome occurred."""
    return Counter(outcome for run in runs for outcome in run.outcomes)


@pytest.mark.parametrize(
    "seeds",
    [
        range(AT_ONCE),
        CHOSEN[::2],
        CHOSEN[1::2],
        *(
            pytest.param(range(first, first + AT_ONCE), marks=pytest.mark.slow)
            for first in range(AT_ONCE, ALL, AT_ONCE)
        ),
    ],
    ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}",
)
def test_any_faults(seeds: Sequence[int]) -> None:
    runs = [simulate(seed, first_fault=FIRST_FAULTS.get(seed % AT_ONCE, "")) for seed in seeds]
    found = outcomes(runs)
    assert found["done"] > len(seeds), found
    struck = {kind for run in runs for kind in run.faults.struck}
    assert struck == set(KINDS), f"only these faults struck: {struck}"


@pytest.mark.parametrize("first", sampled(range(0, 1000, STATES_AT_ONCE), lambda first: first == 0))
def test_any_faults_of_groups_with_recurrent_states(first: int) -> None:
    runs = [simulate(seed, Scale(states=True)) for seed in range(first, first + STATES_AT_ONCE)]
    assert outcomes(runs)["done"] > STATES_AT_ONCE


@pytest.mark.parametrize("first", sampled(range(0, 1000, FEATURES_AT_ONCE), lambda first: first == 0))
def test_any_faults_of_requests_with_priorities_and_grammars(first: int) -> None:
    """Every second model has recurrent states; pages are copied to host memory when they are evicted."""
    seeds = range(first, first + FEATURES_AT_ONCE)
    runs = [simulate(seed, Scale(features=True, states=seed % 2 == 1)) for seed in seeds]
    assert outcomes(runs)["done"] > FEATURES_AT_ONCE
    every = [one for run in runs for one in run.requests]
    recovered = [one for one in every if one.outcome == "done" and one.report.recoveries]
    assert any(one.sampling.grammar for one in recovered) or first > 0  # most of the other seeds have one too


def test_a_cut_in_one_direction() -> None:
    """For most of a minute: the side that receives does not take the other as met, and requests wait."""
    run = simulate(5012, first_fault="cut")
    cuts = [line.split()[2:4] for line in str(run.world.event_log).splitlines() if line.split()[1] == "cut"]
    assert (run.faults.struck, cuts) == (["cut"], [["router-1", "prefill-0"]]), "another seed has such a cut"
    waited = [one for one in run.requests if one.ended_s - one.began_s > 10 * PEER_TIMEOUT_S]
    assert [one.outcome for one in waited] == ["done"] * 3


@pytest.mark.parametrize("seed", [52023, 54584], ids=["cut for long", "back before it is noticed"])
def test_a_router_that_is_cut_off(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It loses all groups, one after the other, and requests that met two of these losses were recovered once.

    Without suspicions, which could move the requests before.
    """
    monkeypatch.setattr("cluster_simulation.world.SUSPECT_AFTER_S", math.inf)
    run = simulate(seed, faults=0, first_fault="isolate")
    log = [line.split()[1:] for line in str(run.world.event_log).splitlines()]
    assert run.faults.struck == ["isolate"], "another seed isolates a router"
    waited = [words for words in log if words[:2] == ["log", "request_waits_for_a_link"]]
    assert waited, "another seed has a request that two groups' silence meets"
    recovered = [one.report.recoveries for one in run.requests if one.report.recoveries]
    assert recovered == [["decode_lost"]] * len(recovered) != []


@pytest.mark.parametrize("seeds", [15, pytest.param(40, marks=pytest.mark.slow)])
def test_a_short_stop_moves_requests_and_ends_nothing(seeds: int) -> None:
    runs = [simulate(seed, faults=0, first_fault="stop") for seed in range(seeds)]
    suspicions = [sum(router.router.suspicions.total() for router in run.world.routers) for run in runs]
    assert sum(map(bool, suspicions)) > 5 * seeds / 8
    moved = Counter(cause for run in runs for one in run.requests for cause in one.report.recoveries)
    assert min(moved["prefill_suspected"], moved["decode_suspected"]) > 0, moved


@pytest.mark.parametrize("seeds", [(3, 8), pytest.param(range(9, 40), marks=pytest.mark.slow)])
def test_prompts_that_move_from_decode_groups(seeds: Iterable[int]) -> None:
    """Many requests at once, so that prompts wait in decode groups; faults strike the groups that they leave and
    reach. In two thirds of the simulations every waiting prompt moves once."""
    runs = [simulate(seed, Scale(requests=30, spread_s=2.0)) for seed in seeds]
    moved = sum(router.router.moved_prompts.total() for run in runs for router in run.world.routers)
    assert moved > 10
    assert {"kill", "cut"} <= {kind for run in runs for kind in run.faults.struck}
    assert outcomes(runs)["done"] > 20


def test_the_simulation_reports_a_suspicion_that_breaks_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    break_a_suspected_group(monkeypatch)
    with pytest.raises(AssertionError, match="a suspicion "):
        outcomes([simulate(seed, faults=0, first_fault="stop") for seed in range(40)])


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_large_cluster(seed: int) -> None:
    """50 groups and 1000 requests."""
    found = outcomes([simulate(seed, LARGE)])
    assert found["done"] > 500, found


@pytest.mark.parametrize("bug", BUGS)
def test_the_simulation_reports_a_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    BUGS[bug](monkeypatch)
    first = BUG_SEEDS.get(bug, 0)
    with pytest.raises((AssertionError, ValueError)) as caught:
        outcomes([simulate(seed) for seed in range(first, first + 40)])
    assert any("cluster_simulation.run.simulate(" in note for note in caught.value.__notes__), (
        "the seed is named"
    )


def test_a_seed_repeats() -> None:
    """Every event, in every process: the order of sets of strings, which differs, changes nothing."""
    root = Path(__file__).parents[2]
    runs = "[simulate(seed).world.event_log.digest for seed in (4, 5)]"
    code = f"""
from disagg.core.collection import imports_frozen
with imports_frozen():
    from cluster_simulation.run import simulate
print({runs})"""
    path = os.pathsep.join([str(root), str(root / "tests" / "support")])
    hash_seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout.strip() == str([simulate(seed).world.event_log.digest for seed in (4, 5)])
