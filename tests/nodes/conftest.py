"""Tiny checkpoints and their reference answers, made once; quiet logs: faults are what these tests are about."""

from __future__ import annotations

import pytest
from local_groups import Checkpoints, small_config
from ordered_simulation import D, Ordered, P


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> Ordered:
    config = small_config(1, 1, chunk_tokens=64, layer_groups=1, peer_memory=True)
    simulation = Ordered(config, 0, monkeypatch)
    simulation.deliver(D, P)
    simulation.deliver(P, D)  # both have linked
    assert simulation.ranks[P].statistics()["transfer"].open_pools == 1
    return simulation
