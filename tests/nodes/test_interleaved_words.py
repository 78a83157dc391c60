"""Direct writes that are reported by completion words, in every order of events (see `interleaved_runs`).

`make test` runs one seed of each kind of trouble, `make test-slow` all the others.
"""

from __future__ import annotations

import pytest
from interleaved_runs import ENDS, ends_of, run_seeds

KINDS = [kind for kind in ENDS if "tiers" not in kind and kind not in ("short", "messages fail")]
"""Kinds of trouble; without messages about segments, there is none about their size."""
FIRST_SEED = 4
"""The seed in `make test`, whose runs are short."""


@pytest.mark.parametrize("what", ["nothing", "abort fail death", "fence", "silence", "deadline"])
def test_words_in_any_order(what: str) -> None:
    """Requests end as they do with notifications."""
    ends = ends_of(run_seeds([FIRST_SEED], f"words {what}"))
    assert ends
    assert ends <= ENDS[what]


@pytest.mark.slow
@pytest.mark.parametrize("what", KINDS)
def test_words_in_many_orders(what: str) -> None:
    ends = ends_of(run_seeds(range(20 if "crowded" in what else 60), f"words {what}"))
    assert "done" in ends
    assert ends <= ENDS[what]
