"""The groups of a cluster on Ray are replaced while requests stream: none fails, and no token differs.

`tests/system/test_roll_streams.py` runs the same without Ray, as part of `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rolled import config_for_roll, roll_under_load

from disagg.cluster.placement import choose_placement
from disagg.cluster.ray import start_cluster
from disagg.core.config.read import read_settings
from transport.keys.curve import make_keys

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)


@pytest.mark.slow
def test_no_request_fails_while_all_groups_are_replaced(ray_session: None, tmp_path: Path) -> None:
    config, keys = config_for_roll(tmp_path), make_keys()
    settings = read_settings(None, {}, {"prefill.max_requests": "7", "decode.max_requests": "5"})
    started = start_cluster(config, choose_placement(0, 1, 1, "cpu"), keys)
    found = roll_under_load(config, keys, started, settings)
    assert min(found.answers) > 1
    assert found.rows == {"prefill-2 r0": 7, "decode-2 r0": 5}
    assert found.lines[-1] == "all groups have the new settings: prefill-2, decode-2"
