"""What the tests of clusters share."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of a cluster look each 0.02 s for changes that nothing signals, instead of each 0.2 s.

    For clusters of fake ranks: a look costs no call of Ray.
    """
    for name in ("lifecycle.WATCH_S", "start.LOOK_S", "supervisor.WAIT_S", "roll.WAIT_S"):
        monkeypatch.setattr(f"disagg.cluster.{name}", 0.02)
