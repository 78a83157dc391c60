"""The automatic size of the prefix cache's second tier, and the host memory that a process may use."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from fake_model import fake_spec

from disagg.core.config.groups import DecodeConfig, GroupConfig, PrefillConfig
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.node import host_memory, rank_start
from disagg.node.host_memory import (
    HostCacheRoom,
    automatic_host_cache,
    available_bytes,
    pinnable_bytes,
    total_bytes,
)
from disagg.node.prefix_caching import configured_host_cache, repeats_pool

GIB = 1 << 30


def test_a_quarter_of_the_available_memory_is_divided_among_the_ranks_of_the_host() -> None:
    assert automatic_host_cache(HostCacheRoom(800 * GIB, 4, 50 * GIB), repeats_pool=True) == (
        50 * GIB,
        "automatic: 1/4 of the available 800 GiB / 4 ranks here",
    )


def test_memory_for_preempted_requests_counts() -> None:
    found = automatic_host_cache(HostCacheRoom(800 * GIB, 4, 50 * GIB, swap_bytes=4 * GIB), repeats_pool=True)
    assert found.nbytes == 46 * GIB
    assert found.reason.endswith("/ 4 ranks here - swap 4 GiB")
    small = HostCacheRoom(8 * GIB, 2, 1 * GIB, swap_bytes=4 * GIB)
    assert automatic_host_cache(small, repeats_pool=False).nbytes == 0


def test_four_times_the_pool_at_most() -> None:
    assert automatic_host_cache(HostCacheRoom(2000 * GIB, 1, 20 * GIB), repeats_pool=True) == (
        80 * GIB,
        "automatic: 4 times the pool",
    )


def test_a_gpu_or_a_storage_needs_a_second_tier() -> None:
    spec = fake_spec(layers=1, kv_heads=1)
    size = partial(configured_host_cache, spec=spec, deterministic=False)
    assert size(PrefillConfig(), on_gpu=False) == (0, "automatic: none on a CPU without a storage")
    assert size(PrefillConfig(), on_gpu=True) is None
    assert size(PrefillConfig(host_cache_bytes=0), on_gpu=True) == (0, "set")
    assert size(PrefillConfig(storage="/kv"), on_gpu=False) is None


def test_a_storage_needs_a_second_tier_of_any_size() -> None:
    assert automatic_host_cache(HostCacheRoom(1 << 20, 2, GIB), repeats_pool=False).nbytes == 1 << 17
    assert not repeats_pool(PrefillConfig(storage="/kv"))


def test_a_tier_that_repeats_a_part_of_the_pool_is_not_made() -> None:
    assert repeats_pool(PrefillConfig())
    assert not repeats_pool(PrefillConfig(host_cache_write="back"))
    room = HostCacheRoom(80 * GIB, 2, 40 * GIB)
    assert automatic_host_cache(room, repeats_pool=True).nbytes == 10 * GIB
    room = room._replace(pool_bytes=room.pool_bytes + 4)
    assert automatic_host_cache(room, repeats_pool=False).nbytes == 10 * GIB
    assert automatic_host_cache(room, repeats_pool=True) == (
        0,
        "automatic: none, 1/4 of the available 80 GiB / 2 ranks here is less than 1/4 of the pool",
    )


def test_an_eighth_of_the_memory_is_not_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "total_bytes", lambda: 800 * GIB)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 130 * GIB)
    assert pinnable_bytes() == 30 * GIB


def test_host_memory_is_the_containers(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("max\n")
    assert total_bytes(tmp_path) == psutil.virtual_memory().total
    (tmp_path / "memory.max").write_text("1048576\n")
    assert total_bytes(tmp_path) == 1 << 20


def test_the_use_of_the_container_is_not_available_except_for_files(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text(f"{1 << 20}\n")
    assert available_bytes(tmp_path) == 1 << 20
    (tmp_path / "memory.current").write_text("700000\n")
    assert available_bytes(tmp_path) == (1 << 20) - 700_000
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\n")
    assert available_bytes(tmp_path) == (1 << 20) - 500_000
    (tmp_path / "memory.max").write_text("500000\n")
    assert available_bytes(tmp_path) == 0
    (tmp_path / "memory.max").write_text(f"{1 << 60}\n")
    assert available_bytes(tmp_path) > 1 << 20


@pytest.mark.parametrize(("mode", "limited"), [("0", False), ("2", True)])
def test_a_host_without_overcommitment_grants_no_more_than_its_limit(
    tmp_path: Path, mode: str, limited: bool
) -> None:
    (tmp_path / "sys" / "vm").mkdir(parents=True)
    (tmp_path / "sys" / "vm" / "overcommit_memory").write_text(f"{mode}\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:  100 kB\nHugePages_Total:  0\nCommitLimit:  3000 kB\nCommitted_AS:  2000 kB\n"
    )
    assert (available_bytes(tmp_path, tmp_path) == 1000 << 10) == limited


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("1000000")
    (old / "memory.usage_in_bytes").write_text("900000")
    (old / "memory.stat").write_text("inactive_file 1\ntotal_inactive_file 50000\n")
    assert total_bytes(tmp_path) == 1_000_000
    assert available_bytes(tmp_path) == 150_000


@pytest.mark.parametrize(
    ("group", "setting"),
    [
        (PrefillConfig(storage="/kv"), "set prefill.host_cache_bytes"),
        (
            DecodeConfig(storage="/kv", swap_bytes=GIB),
            "set decode.host_cache_bytes, or lower decode.swap_bytes",
        ),
    ],
)
def test_a_storage_without_host_memory_names_settings_of_its_group(
    monkeypatch: pytest.MonkeyPatch, group: GroupConfig, setting: str
) -> None:
    monkeypatch.setattr(rank_start, "available_bytes", lambda: 0)
    for name in ("pool_bytes", "state_bytes"):
        monkeypatch.setattr(rank_start, name, lambda _: GIB)
    model: Any = SimpleNamespace(group=group, device=torch.device("cpu"), config=Config())
    runner: Any = SimpleNamespace(spec=fake_spec(layers=1, kv_heads=1))
    with pytest.raises(ConfigError, match="storage needs host memory") as raised:
        rank_start.with_host_cache(model, runner, host_ranks=1)
    assert str(raised.value).endswith(setting)


@pytest.mark.parametrize(("available", "nbytes"), [(0, 0), (80 * GIB, 0), (120 * GIB, 30 * GIB)])
def test_a_gpu_has_a_second_tier_if_memory_is_left(
    available: int, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_start, "available_bytes", lambda: available)
    monkeypatch.setattr(rank_start, "swap_bytes", lambda *_: 0)
    for name in ("pool_bytes", "state_bytes"):
        monkeypatch.setattr(rank_start, name, lambda _: 50 * GIB)
    model: Any = SimpleNamespace(group=PrefillConfig(), device=torch.device("cuda"), config=Config())
    model._replace = lambda group: SimpleNamespace(group=group)
    runner: Any = SimpleNamespace(spec=fake_spec(layers=1, kv_heads=1))
    resolved, size = rank_start.with_host_cache(model, runner, host_ranks=1)
    assert resolved.group.host_cache_bytes == size.nbytes == nbytes
