"""Tiny checkpoints and their reference answers, made once; quiet logs: faults are what these tests are about."""

from __future__ import annotations

import pytest
from local_groups import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
