"""Memory of recurrent states: a pool that does not fit, its size after `resize`, and its description."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRIDS, MORE_HYBRIDS, save
from model_helpers import make_runner

from disagg.core.config.read import Config, DecodeConfig
from disagg.core.errors import ConfigError
from disagg.model import runner as runners
from disagg.model.collective.base import SingleCollective, ThreadCollective, run_ranks
from disagg.model.load.source import ModelSource
from disagg.model.recurrent.state import STATES_SHARE, state_rows
from disagg.node import assemble
from disagg.node.rank_start import RankModel
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


@pytest.mark.parametrize(
    ("rows", "left_bytes", "expected"),
    [
        (256, 1 << 40, 256),
        (256, 400_000, 100),
        (256, 403_999, 100),
        (256, 3_999, 1),
        (256, -5, 1),
        (7, 400_000, 7),
    ],
)
def test_the_states_of_all_rows_take_a_share_of_the_memory(rows: int, left_bytes: int, expected: int) -> None:
    assert state_rows(rows, 1000, left_bytes) == expected


def test_automatic_rows_are_those_of_the_rank_with_the_least_memory(tmp_path: Path) -> None:
    """Cached states follow the number of rows; a rank needs memory for the states of its heads only."""
    directory = save(MORE_HYBRIDS["bamba"](), tmp_path)
    half = 11264

    def work(collective: ThreadCollective) -> tuple[int, int, int]:
        weights_bytes = make_runner(directory, collective).weights_bytes
        memory_bytes = weights_bytes + int((9 + collective.rank) * half / STATES_SHARE)
        runner = make_runner(
            directory, collective, rows=256, memory_bytes=memory_bytes, cached_states=lambda rows: 4 * rows
        )
        assert runner.states is not None
        statistics = runner.states.pool.statistics()
        return runner.req_to_token.rows, statistics.slots, statistics.slot_bytes

    assert run_ranks(2, work) == [(9, 9 + 1 + 36, half)] * 2


def test_rows_of_models_without_states_are_not_limited() -> None:
    assert make_runner(ModelSource.random_init("tiny-llama"), rows=9, memory_bytes=1).req_to_token.rows == 9


@pytest.mark.parametrize(("given", "rows"), [(0, 11), (40, 40)])
def test_a_rank_chooses_only_an_automatic_number_of_requests(
    given: int, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = ModelSource.from_directory(save(MORE_HYBRIDS["bamba"](), tmp_path))
    weights_bytes = make_runner(source).weights_bytes
    memory_bytes = weights_bytes + int(11.5 * 21504 / STATES_SHARE)
    monkeypatch.setattr(assemble, "device_limit_bytes", lambda *_: memory_bytes)
    group = DecodeConfig(tp=1, max_requests=given, max_context_tokens=64).sized("cuda", requests=False)
    model = RankModel(Config(decode=group), group, torch.device("cpu"), source, Future())
    runner = assemble.make_runner(model.config, group, source, SingleCollective(), model.device)
    assert runner.req_to_token.rows == rows
    assert runner.states is not None
    assert runner.states.pool.slots == rows + 1 + rows // 8, "cached states follow"
    resolved = model.group_of(runner)
    assert (resolved.max_requests, resolved.decode_batch) == (rows, rows)
