"""Hybrid models with a storage: states come back after evictions and restarts; tokens are those of `generate`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import structlog
from architectures import hybrid, save
from local_groups import (
    Checkpoints,
    LocalGroups,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from redis_servers import fake_server
from slow_parameters import sampled
from storing_groups import (
    PROMPTS,
    TOKENS,
    serve,
    serve_one_by_one,
    tier_of,
    wait_until_written,
    with_storage,
)

from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.core.prefixes import PrefixKey
from disagg.kv.host_slabs import HostSlabs
from disagg.model.load.source import ModelSource
from disagg.node.group_storage import page_keys, part_grid
from disagg.storage.record import HEADER_BYTES, parse_header

PAGES = 6 + 5
"""Full pages of `PROMPTS`."""
STATES = 3 + 3
"""Of `PROMPTS`: every 32 tokens, and, of the second prompt, behind its last page."""
MODELS = ["falcon-h1", "qwen3-next", "jamba", "lfm2", "zamba2"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hybrids")


def source_of(directory: Path, name: str) -> ModelSource:
    if not (path := directory / name).exists():
        path.mkdir()
        save(hybrid(name), path)
    return ModelSource.from_directory(path)


def config_of(folder: Path, tp: int = 1, **more: Any) -> Config:
    return with_storage(folder, small_config(tp, 1), "prefill", **{"state_interval_tokens": 32, **more})


def expected(checkpoints: Checkpoints, source: ModelSource, prompts: list[list[int]]) -> list[list[int]]:
    return [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]


@pytest.mark.parametrize(
    ("name", "writers", "readers"),
    sampled(
        [(name, *sizes) for name in MODELS for sizes in ((2, 1), (1, 2))],
        lambda name, writers, readers: (name, writers) in (("falcon-h1", 2), ("qwen3-next", 1)),
    ),
)
def test_a_restarted_group_of_another_size_reads_the_states(
    name: str, writers: int, readers: int, directory: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    source = source_of(directory, name)
    with local_groups(config_of(tmp_path, writers), source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        wait_until_written(groups.prefill, PAGES, STATES)
    longer = [prompt + tail for prompt, tail in zip(PROMPTS, random_prompts(20, 3, seed=7), strict=True)]
    with local_groups(config_of(tmp_path, readers), source) as groups:
        assert serve(groups, longer) == expected(checkpoints, source, longer)
        tier = tier_of(groups.prefill)
        assert (tier.fetched_pages, tier.fetched_states, tier.used_pages) == (PAGES, 2, PAGES)
        status = groups.prefill[0].leader.status()
        assert (status.storage_fetched_states_total, status.storage_hit_tokens_total) == (2, PAGES * 16)


def test_what_both_memories_have_evicted_comes_back(
    directory: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """A pool of 16 pages, host memory of 12 pages, and four texts of 6 pages, each twice."""
    source = source_of(directory, "falcon-h1")
    texts = random_prompts(*[100] * 4, seed=3)
    tails = random_prompts(*range(1, 9), seed=4)
    prompts = [text + tail for text, tail in zip(texts * 2, tails, strict=True)]
    memory = {"pool_tokens": 256, "max_context_tokens": 256, "cached_states": 4, "host_cache_bytes": 3 << 16}
    with local_groups(config_of(tmp_path, **memory), source) as groups:
        answers = serve_one_by_one(groups, groups.prefill, prompts)
        assert answers == expected(checkpoints, source, prompts)
        tier, host = tier_of(groups.prefill), groups.prefill[0].statistics()["leader"].memory.host
    assert host.cache.evicted_pages > 0
    assert tier.fetched_states > 0
    assert tier.used_pages > 0


@pytest.mark.parametrize("damaged", ["deepest", "all"])
def test_damaged_states_are_dropped(
    damaged: str, directory: Path, checkpoints: Checkpoints, tmp_path: Path
) -> None:
    """The KV before a damaged state is of use up to the state before it; the dropped states are stored again."""
    source = source_of(directory, "falcon-h1")
    with local_groups(config_of(tmp_path), source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        wait_until_written(groups.prefill, PAGES, STATES)
        keys = state_keys(groups, PROMPTS, slice(None) if damaged == "all" else slice(-1, None))
    damage(tmp_path, keys)
    with local_groups(config_of(tmp_path), source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        tier = tier_of(groups.prefill)
        assert (tier.fetched_pages, tier.fetched_states) == (PAGES, 0 if damaged == "all" else 2)
        wait_until_written(groups.prefill, 0, 2)
        groups.prefill[0].report()
        (status,) = groups.prefill[0].leader.status().ranks
        assert status.storage_corrupt_total > 0
    with local_groups(config_of(tmp_path), source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        assert tier_of(groups.prefill).fetched_states == 2


def state_keys(groups: LocalGroups, prompts: list[list[int]], pages: slice) -> set[bytes]:
    """Keys of the states behind some `pages` of each prompt."""
    rank, section = groups.prefill[0], groups.config.prefill
    keys = page_keys(groups.prefill_info, groups.config, section, rank.runner.spec)
    parts = part_grid(section, rank.runner.spec).state_parts
    found = [keys.links(PrefixKey.of(prompt))[pages] for prompt in prompts]
    return {key for links in found for key in keys.keys(links, parts)}


def damage(folder: Path, keys: set[bytes]) -> None:
    """Changes a byte in the content of each record of `keys`."""
    changed = 0
    for path in folder.glob("*.pages"):
        data = bytearray(path.read_bytes())
        for start in range(0, len(data), 4096):
            header = parse_header(memoryview(data)[start:])
            if header is not None and header.key in keys:
                data[start + HEADER_BYTES] ^= 1
                changed += 1
        path.write_bytes(data)
    assert changed


def test_kv_without_states_is_computed(directory: Path, checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A decode group stores KV only; other decode groups use it, and prefill groups do not."""
    source = source_of(directory, "qwen3-next")
    config = with_storage(tmp_path, small_config(1, 2), "decode", prefetch="timeout")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        wait_until_written(groups.decode, PAGES)
    config = with_storage(tmp_path, small_config(1, 1), "prefill", "decode", prefetch="timeout")
    with local_groups(config, source) as groups:
        assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
        prefill, decode = tier_of(groups.prefill), tier_of(groups.decode)
        assert (prefill.fetched_pages, prefill.fetched_states) == (0, 0)
        assert (decode.fetched_pages, decode.fetched_states, decode.written_states) == (PAGES, 0, 0)


def test_a_colocated_group_reads_its_states_from_a_server(directory: Path, checkpoints: Checkpoints) -> None:
    source = source_of(directory, "qwen3-next")
    with fake_server() as server:
        config = with_storage(server.url, colocated_config(), "colocated", state_interval_tokens=32)
        for fetched in (0, 2):
            with local_groups(config, source) as groups:
                assert serve(groups, PROMPTS) == expected(checkpoints, source, PROMPTS)
                ranks = groups.groups["colocated"]
                assert tier_of(ranks).fetched_states == fetched
                if not fetched:
                    wait_until_written(ranks, PAGES, STATES)


def test_host_memory_without_room_for_a_state_is_named(directory: Path, tmp_path: Path) -> None:
    source = source_of(directory, "falcon-h1")
    with (
        structlog.testing.capture_logs() as lines,
        local_groups(config_of(tmp_path, host_cache_bytes=32 << 10), source) as groups,
    ):
        assert groups.prefill[0].statistics()["leader"].memory.host is None
    (line,) = [one for one in lines if one["event"] == "no_second_tier"]
    assert line["log_level"] == "warning"
    assert "prefill.host_cache_bytes has no room for a recurrent state" in line["why"]
    assert "prefill.storage is not used" in line["why"]
    least = int(line["how"].split()[3])
    with (
        structlog.testing.capture_logs() as lines,
        local_groups(config_of(tmp_path, host_cache_bytes=least), source) as groups,
    ):
        assert groups.prefill[0].statistics()["leader"].memory.host is not None
    assert not [one for one in lines if one["event"] == "no_second_tier"]


def test_a_host_that_cannot_pin_the_second_tier_is_named(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = source_of(directory, "falcon-h1")
    monkeypatch.setattr(HostSlabs, "pin", lambda self, room_bytes: 0)
    with (
        structlog.testing.capture_logs() as lines,
        local_groups(config_of(tmp_path, host_cache_bytes=1 << 20), source) as groups,
    ):
        assert groups.prefill[0].statistics()["leader"].memory.host is None
    (line,) = [one for one in lines if one["event"] == "no_second_tier"]
    assert line["why"].startswith("a rank's host cannot pin memory for prefill.host_cache_bytes")
    assert line["how"] == "lower prefill.host_cache_bytes, or free memory"


def test_a_model_without_kv_has_no_storage(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"prefill\.storage is not available for models without attention \(Mamba2ForCausalLM\)",
    ):
        LocalGroups(config_of(tmp_path), source_of(directory, "mamba2"))


def test_a_model_without_kv_shares_no_host_memory(directory: Path) -> None:
    config = with_storage("", small_config(1, 1), "prefill", host_cache_shared=True)
    with pytest.raises(ConfigError, match=r"prefill\.host_cache_shared is not available for models without"):
        LocalGroups(config, source_of(directory, "mamba2"))
