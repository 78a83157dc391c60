"""All groups of a cluster are replaced while requests stream through a router: none fails, and no token differs.

Directory, supervisor, router and ranks are real, with real sockets; the ranks are threads of this process.
`tests/cluster/on_ray/test_roll_on_ray.py` runs the same with Ray.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rolled import config_for_roll, roll_under_load
from thread_ranks import ThreadRanks

from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import choose_placement
from disagg.core.config.read import Config, read_settings
from transport.keys.curve import ControlKeys, make_keys


@contextmanager
def on_threads(config: Config, keys: ControlKeys, devices: int) -> Iterator[Cluster]:
    groups = config.prefill.groups, config.decode.groups
    cluster = Cluster(config, choose_placement(0, 1, 1, "cpu", groups), keys, ThreadRanks(devices))
    try:
        cluster.start(lambda text: None)
        yield cluster
    finally:
        cluster.stop()


@pytest.mark.parametrize(
    ("devices", "groups"), [(3, (1, 1)), (4, (2, 2))], ids=["free_device", "no_free_device"]
)
def test_no_request_fails_while_all_groups_are_replaced(
    tmp_path: Path, devices: int, groups: tuple[int, int]
) -> None:
    config, keys = config_for_roll(tmp_path, groups, "tls"), make_keys()
    settings = read_settings(None, {}, {"prefill.max_requests": "7", "decode.max_requests": "5"})
    found = roll_under_load(config, keys, on_threads(config, keys, devices), settings)
    assert min(found.answers) > 1, "several answers of each stream while groups were replaced"
    assert len(found.rows) == sum(groups)
    assert found.rows == {name: 7 if name.startswith("prefill") else 5 for name in found.rows}, found.lines
    drained_first = sum("ends before its replacement starts" in line for line in found.lines)
    assert drained_first == (0 if devices > sum(groups) else 4)
