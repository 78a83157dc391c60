"""Fixtures of the cluster tests."""

from __future__ import annotations

import pytest


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cluster's threads poll every 0.02 s instead of every 0.2 s.

    For clusters of fake ranks, where polling calls no Ray.
    """
    for name in ("lifecycle.WATCH_S", "start.LOOK_S", "supervisor.WAIT_S", "roll.WAIT_S"):
        monkeypatch.setattr(f"disagg.cluster.{name}", 0.02)
