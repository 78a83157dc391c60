"""One private Ray for all files of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from disagg.cluster.ray import local_ray


@pytest.fixture(scope="package")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks take for the user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="package")
def ray_session(cache: Path) -> Iterator[None]:
    """Has room for two clusters."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with local_ray(6):
            yield
