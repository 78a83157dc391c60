"""Damaged segments in every order of events (see `interleaved_runs`).

`make test` runs one seed of each kind of trouble that no other kind contains, `make test-slow` all the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from interleaved_runs import CONTAINED, ENDS, ends_of, run_seeds
from slow_parameters import sampled

DAMAGED = {kind: ends for kind, ends in ENDS.items() if "crowded" not in kind} | {"crowded": {"done"}}
FIRST_SEED = 4
"""The seed in `make test`, whose runs are short."""
COMBINED = (CONTAINED | {"tiers abort", "tiers back death", "tiers back storage"}) - {"crowded"}
"""Runs whose kinds of trouble occur in others too."""


@pytest.mark.parametrize("what", sampled(DAMAGED, lambda what: what not in COMBINED))
def test_damaged_segments_in_any_order(what: str) -> None:
    """Segments are resent, whatever else happens: requests end as they do without damage."""
    ends = ends_of(run_seeds([FIRST_SEED], f"damage {what}"))
    assert ends
    assert ends <= DAMAGED[what]


def sweeps() -> list[tuple[str, range]]:
    """The seeds in `make test-slow`. Runs with a storage are long: a test has a quarter of their seeds.

    Unless ranks are killed: not every quarter has each end of a request that loses its peer.
    """
    found: list[tuple[str, range]] = []
    for what, ends in DAMAGED.items():
        parts = 4 if "storage" in what and "peer_lost" not in ends else 1
        seeds = range(20 if "crowded" in what else 80)
        found += [(what, seeds[20 * part : 20 * part + 20] if parts > 1 else seeds) for part in range(parts)]
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("what", "seeds"), sweeps(), ids=[f"{what}-{seeds[0]}" for what, seeds in sweeps()])
def test_damaged_segments_in_many_orders(what: str, seeds: range) -> None:
    others = [seed for seed in seeds if seed != FIRST_SEED]
    assert ends_of(run_seeds(others, f"damage {what}")) == DAMAGED[what]


@pytest.mark.parametrize(
    "seeds", [(2, 5), pytest.param(range(6, 20), marks=pytest.mark.slow)], ids=["first", "more"]
)
@pytest.mark.parametrize(
    ("what", "others"),
    [("nothing", set()), ("abort and fail", {"aborted", "transport"})],
    ids=["nothing", "abort and fail"],
)
def test_segments_that_are_damaged_twice_in_any_order(
    what: str, others: set[str], seeds: Sequence[int]
) -> None:
    ends = ends_of(run_seeds(seeds, f"damage twice {what}"))
    assert {"done", "checksum"} <= ends <= {"done", "checksum"} | others
