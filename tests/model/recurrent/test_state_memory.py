"""Memory of recurrent states: a pool that does not fit, its size after `resize`, and its description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, save
from model_helpers import make_runner

from disagg.core.errors import ConfigError
from disagg.model import runner as runners
from disagg.node.sizing import describe_pool, state_bytes


def test_a_pool_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"^recurrent states of 3 requests and 1099511627776 cached states do not fit cpu: 1099511627780 slots "
        r"of 1,536 bytes are 1,688,849,860,270,0\d\d bytes; "
        r"lower prefill.max_requests \(3\) or prefill.cached_states \(1099511627776\)$",
    ):
        make_runner(save(HYBRIDS["lfm2"](), tmp_path), cached_states=1 << 40)


def test_the_error_names_the_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nlong text")

    monkeypatch.setattr(runners, "MambaPool", full)
    with pytest.raises(ConfigError, match=r"; lower decode.max_requests \(3\)$"):
        make_runner(save(HYBRIDS["lfm2"](), tmp_path), section="decode")


def test_a_resized_pool_keeps_the_states(tmp_path: Path) -> None:
    runner = make_runner(save(HYBRIDS["lfm2"](), tmp_path), cached_states=4)
    states = runner.states
    runner.resize(64)
    assert (runner.states, runner.pool.slots) == (states, 64)


def test_the_bytes_of_states_are_described(tmp_path: Path) -> None:
    runner = make_runner(save(HYBRIDS["lfm2"](), tmp_path / "lfm2"), cached_states=1500)
    assert state_bytes(runner) == 1503 * runner.spec.layout.state_bytes == 1503 * 1536
    assert describe_pool(runner).endswith(" = 368 tokens, states 2.3 MB = 3 requests + 1,500 cached")
    assert describe_pool(make_runner(tmp_path / "lfm2")).endswith("states 0.0 MB = 3 requests")


def test_a_model_without_prefix_cache_has_no_slots_for_it(tmp_path: Path) -> None:
    runner = make_runner(save(MORE_HYBRIDS["minimax"](), tmp_path), cached_states=4)
    assert runner.spec.cache_refused
    assert runner.states is not None
    assert runner.states.pool.slots == 4, "three rows and the trash row"
