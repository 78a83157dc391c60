"""Tiny checkpoints and their reference answers, made once for all tests of the whole system."""

from __future__ import annotations

import pytest
from local_groups import Checkpoints


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    return Checkpoints(tmp_path_factory.mktemp("checkpoints"))
