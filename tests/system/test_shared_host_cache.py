"""Groups read each other's host memory: tokens are those of `generate`, whatever happens to the other group."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from architectures import hybrid, save
from launched import until
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from page_peers import until as wait_until
from storing_groups import GREEDY, PROMPTS, TOKENS, all_written, tier_of, wait_until_written, with_storage

from disagg.core.config.read import Config
from disagg.core.types import SamplingParams
from disagg.kv.cache_operations import CacheOperation, PoolTransfer
from disagg.model.load.source import ModelSource
from disagg.router.router import Router

PAGES = 6
"""Whole pages of the first prompt."""


def sharing(config: Config, *roles: str, where: Path | str = "", **more: Any) -> Config:
    """Requests go to the groups of a role in turn, not to the group that has their prefix in memory."""
    router = msgspec.structs.replace(config.router, policy="round_robin")
    config = with_storage(where, config, *roles, **{"host_cache_shared": True, **more})
    return msgspec.structs.replace(config, router=router)


def two_groups(where: Path | str = "", **more: Any) -> Config:
    return sharing(colocated_config(groups=2), "colocated", where=where, **more)


def serve_in_turn(groups: LocalGroups, salts: Sequence[str] = ("", "")) -> list[list[int]]:
    """The first group answers, and stores the prompt in its memory; then the second group answers."""

    async def work(router: Router) -> list[list[int]]:
        tokens = []
        for number, salt in enumerate(salts):
            if number:
                wait_until_written(groups.groups["colocated"], PAGES)
            outputs = router.generate(f"r{number}", PROMPTS[0], GREEDY, timeout_s=30.0, cache_salt=salt)
            tokens.append([token async for output in outputs for token in output.tokens])
        return tokens

    answers: list[list[int]] = groups.serve(work)
    return answers


def page_reply(source: str, destination: str, tag: int) -> bool:
    return source == "colocated-0-pages" and bool(tag >> 63)


def test_a_group_reads_what_another_group_has_in_memory(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    with local_groups(two_groups(), source) as groups:
        first, second = groups.groups["colocated"], groups.groups["colocated-2"]
        assert serve_in_turn(groups) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        assert (tier_of(first).fetched_pages, tier_of(second).fetched_pages) == (0, PAGES)
        assert second[0].statistics()["leader"].memory.host.loaded_pages == PAGES
        assert first[0].statistics()["sharing"].served_parts == PAGES * 4  # KV heads
        wait_until_written(second, 0)
        second[0].report()
        (status,) = second[0].leader.status().ranks
        assert (status.shared_peers, status.shared_hit_bytes_total) == (1, PAGES * 4 * 16 * 8 * 4 * 2 * 3)


def test_without_the_setting_nothing_is_shared(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    config = two_groups(host_cache_shared=False)
    with local_groups(config, source) as groups:
        answers = groups.answers([PROMPTS[0]] * 2, GREEDY)
        expected = checkpoints.greedy(source, PROMPTS[0], TOKENS)
        assert [answer.tokens for answer in answers] == [expected] * 2
        assert [rank.sharing for rank in groups.ranks] == [None] * 2
        assert all(info.ranks[0].page_server is None for info in groups.infos.values())


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1)])
def test_ranks_of_groups_of_different_sizes(
    checkpoints: Checkpoints, prefill_tp: int, decode_tp: int
) -> None:
    """A prefill group reads an answer, which only the decode group has; the next turn begins with it."""
    source, sampling = checkpoints.source(), SamplingParams(max_tokens=40, ignore_eos=True)
    answer = checkpoints.greedy(source, PROMPTS[0], 40)
    turn = [*PROMPTS[0], *answer, *PROMPTS[1][:5]]
    config = sharing(small_config(prefill_tp, decode_tp), "prefill", "decode")
    with local_groups(config, source) as groups:

        async def work(router: Router) -> list[list[int]]:
            first = await ask(router, "r0", PROMPTS[0], sampling)
            wait_until_written(groups.prefill, PAGES)
            wait_until_written(groups.decode, (100 + 40 - 1) // 16)
            return [first.tokens, (await ask(router, "r1", turn, GREEDY)).tokens]

        assert groups.serve(work) == [answer, checkpoints.greedy(source, turn, TOKENS)]
        assert tier_of(groups.prefill).fetched_pages == (100 + 40 - 1) // 16 - PAGES
        served = [rank.statistics()["sharing"].served_parts for rank in groups.decode]
        assert served == [2 * 4 // decode_tp] * decode_tp


def test_recurrent_states_are_read_too(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """A hit of a hybrid model ends at a state; without states from the other group nothing would be loaded."""
    save(hybrid("falcon-h1"), tmp_path)
    source = ModelSource.from_directory(tmp_path)
    with local_groups(two_groups(state_interval_tokens=32), source) as groups:
        assert serve_in_turn(groups) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        tier = tier_of(groups.groups["colocated-2"])
        assert (tier.fetched_pages, tier.fetched_states) == (PAGES, 1)


def test_other_salts_share_nothing(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    with local_groups(two_groups(), source) as groups:
        answers = serve_in_turn(groups, ("one tenant", "another tenant"))
        assert answers == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        assert tier_of(groups.groups["colocated-2"]).fetched_pages == 0
        assert groups.ranks[0].statistics()["sharing"].served_parts == 0


@pytest.mark.parametrize(
    ("fault", "nth"),
    [
        ("kill", 0),
        ("hold", 0),
        ("fail_send", 0),
        *((fault, 2) for fault in ("kill", "hold", "sever", "truncate")),
    ],
)
def test_a_fault_of_the_serving_group_costs_no_request(
    checkpoints: Checkpoints, fault: str, nth: int
) -> None:
    """The reply to the search (0), or that with the pages (2, after a search for all heads), is lost."""
    source = checkpoints.source()
    with local_groups(two_groups(prefetch_base_s=0.3), source) as groups:
        faults = groups.fabric.faults
        arguments: dict[str, tuple[Any, ...]] = {"truncate": (1000,), "kill": ("colocated-0-pages",)}
        getattr(faults, fault)(*arguments.get(fault, ()), nth=nth, when=page_reply)
        assert serve_in_turn(groups) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        assert faults.all_struck
        second = groups.groups["colocated-2"]
        assert tier_of(second).fetched_pages == 0
        second[0].report()
        assert second[0].leader.status().ranks[0].shared_faults_total > 0
        groups.fabric.release()


def test_a_damaged_page_is_computed(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    with local_groups(two_groups(), source) as groups:
        groups.fabric.faults.flip(8 * 50_000, nth=2, when=page_reply)
        assert serve_in_turn(groups) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        assert groups.fabric.faults.all_struck
        second = groups.groups["colocated-2"]
        assert 0 < tier_of(second).fetched_pages < PAGES
        second[0].report()
        assert second[0].leader.status().ranks[0].storage_corrupt_total == 1


def test_pages_that_are_evicted_between_search_and_read(checkpoints: Checkpoints) -> None:
    """The serving group overwrites all of its blocks while the other group reads them."""
    source = checkpoints.source()
    with local_groups(two_groups(), source) as groups:
        (rank,) = groups.groups["colocated"]
        blocks = list(range(PAGES + 2))
        store = CacheOperation(1 << 20, True, [PoolTransfer("kv", [0] * len(blocks), blocks)])
        plan: Any = SimpleNamespace(cache_operations=[store], storage_operations=[], unwanted_fetches=[])

        def evict(source: str, destination: str, tag: int, data: torch.Tensor) -> None:
            if destination == "colocated-0-pages" and data[0] == 1:  # a read
                rank.order_copies(plan)

        groups.fabric.observe(evict)
        assert serve_in_turn(groups) == [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
        assert tier_of(groups.groups["colocated-2"]).fetched_pages == 0
        assert rank.sharing.served.count == 0


def test_blocks_that_have_other_pages_by_now_are_not_read(checkpoints: Checkpoints) -> None:
    """The first group's memory has room for 8 pages: the second prompt takes blocks of the first one."""
    source = checkpoints.source()
    prompts = [PROMPTS[0], PROMPTS[1], random_prompts(90, seed=12)[0], PROMPTS[0]]
    with local_groups(two_groups(host_cache_bytes=8 * 3 * 2 * 16 * 4 * 8 * 4), source) as groups:

        async def work(router: Router) -> list[list[int]]:
            tokens = []
            for number, prompt in enumerate(prompts):  # groups 1, 2, 1, 2
                tokens.append((await ask(router, f"r{number}", prompt, GREEDY)).tokens)
                await until(lambda: all(all_written(ranks) for ranks in groups.groups.values()))
            return tokens

        assert groups.serve(work) == [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]
        assert 0 < tier_of(groups.groups["colocated-2"]).fetched_pages < PAGES
        assert groups.groups["colocated"][0].statistics()["leader"].memory.host.cache.evicted_pages > 0


def test_the_storage_has_what_no_group_has_in_memory(checkpoints: Checkpoints, tmp_path: Path) -> None:
    source = checkpoints.source()
    expected = [checkpoints.greedy(source, PROMPTS[0], TOKENS)] * 2
    with local_groups(two_groups(tmp_path), source) as groups:
        assert serve_in_turn(groups) == expected
        assert groups.groups["colocated-2"][0].statistics()["sharing"].peers == 1
        assert tier_of(groups.groups["colocated-2"]).fetched_pages == PAGES
        assert groups.groups["colocated"][0].statistics()["sharing"].served_parts == PAGES * 4
        wait_until_written(groups.groups["colocated"], PAGES)
    with local_groups(two_groups(tmp_path), source) as groups:  # nothing is in memory
        assert groups.answers(PROMPTS[:1], GREEDY)[0].tokens == expected[0]
        assert sum(tier_of(ranks).fetched_pages for ranks in groups.groups.values()) == PAGES
        assert all(rank.statistics()["sharing"].served_parts == 0 for rank in groups.ranks)


def test_a_group_that_has_ended_is_forgotten(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    with local_groups(two_groups(), source, dead=["colocated-0"]) as groups:
        (rank,) = groups.groups["colocated-2"]
        wait_until(lambda: rank.statistics()["sharing"].peers == 1, "connected")
        groups.kill("colocated-0")
        rank.peer_lost("colocated-0")
        wait_until(lambda: not rank.statistics()["sharing"].peers, "forgotten")
        assert rank.statistics()["sharing"].lost_peers == 0
        rank.know_groups([groups.infos["colocated-2"]])
