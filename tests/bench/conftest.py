"""What all benchmarks' tests share."""

from __future__ import annotations

import pytest
from forked_processes import fork_instead_of_spawn


@pytest.fixture(autouse=True)
def _forked_processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A benchmark's ranks start at once; those on GPUs are spawned, as in use."""
    if request.node.get_closest_marker("gpu") is None:
        fork_instead_of_spawn(monkeypatch)
