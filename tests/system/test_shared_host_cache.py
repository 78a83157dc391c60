"""Groups read each other's host memory: tokens are those of `generate`, whatever happens to the other group."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from architectures import hybrid, save
from conditions import PATIENCE_S, until, until_async
from local_groups import (
    Checkpoints,
    LocalGroups,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from storing_groups import GREEDY, PROMPTS, TOKENS, all_written, tier_of, wait_until_written, with_storage

from disagg.core.config.read import Config
from disagg.core.errors import TransportError
from disagg.core.prefixes import PrefixKey
from disagg.core.types import SamplingParams
from disagg.kv.cache_operations import CacheOperation, PoolTransfer
from disagg.model.load.source import ModelSource
from disagg.node import renewed_exchange
from disagg.node.group_storage import page_keys, page_parts, part_grid, state_parts
from disagg.node.plan import StepPlan
from disagg.router.router import Router
from transport.base import Operation

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
                wait_until_announced(groups.groups["colocated-2"], groups.groups["colocated"])
            outputs = router.generate(f"r{number}", PROMPTS[0], GREEDY, timeout_s=PATIENCE_S, cache_salt=salt)
            tokens.append([token async for output in outputs for token in output.tokens])
        return tokens

    answers: list[list[int]] = groups.serve(work)
    return answers


def wait_until_announced(readers: Sequence[Any], owners: Sequence[Any]) -> None:
    """Each rank of `readers` knows all items of the ranks of `owners` that have parts of the reader."""

    def announced(reader: Any) -> bool:
        at = {owner: reader.sharing.index.position(owner.control.address) for owner in owners}
        known = {owner: one for owner, one in at.items() if one.epoch == owner.sharing.served.epoch}
        return len(known) == reader.statistics()["sharing"].peers > 0 and all(
            (one.version, one.next_place) == (owner.sharing.served.version, None)
            for owner, one in known.items()
        )

    until(lambda: all(map(announced, readers)), "announced")


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
        assert (status.shared_peers, status.shared_hit_bytes_total) == (1, PAGES * 4 * 16 * 8 * 4 * 2 * 2)


def test_pages_that_no_group_has_cause_no_message(checkpoints: Checkpoints) -> None:
    """KV events have said so before the requests come."""
    source = checkpoints.source()
    prompts = [PROMPTS[0], PROMPTS[1], random_prompts(90, seed=12)[0]]
    with local_groups(two_groups(), source) as groups:
        first, second = groups.groups["colocated"], groups.groups["colocated-2"]
        wait_until_announced(first, second)
        wait_until_announced(second, first)
        messages: list[str] = []
        groups.fabric.observe(lambda source, destination, tag, data: messages.append(source))
        answers = groups.answers(prompts, GREEDY)
        assert [answer.tokens for answer in answers] == [
            checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts
        ]
        assert messages == []
        assert sum(rank.sharing.served.count for rank in groups.ranks) > 0


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
            wait_until_announced(groups.prefill, groups.decode)
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
        rank = groups.groups["colocated-2"][0]
        grid, group = part_grid(rank.group_config, rank.runner.spec), groups.infos["colocated-2"]
        pages, states = page_parts(group, 0, grid), state_parts(group, 0, grid)
        assert states is not None
        token_bytes = pages.read.nbytes / group.page_size
        assert rank.kv_manager.storage.state_tokens == states.read.nbytes / token_bytes


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
        plan = StepPlan(step=0, work=[], cache_operations=[store])

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
    with local_groups(two_groups(host_cache_bytes=8 * 2 * 2 * 16 * 4 * 8 * 4), source) as groups:

        async def work(router: Router) -> list[list[int]]:
            tokens = []
            for number, prompt in enumerate(prompts):  # groups 1, 2, 1, 2
                tokens.append((await ask(router, f"r{number}", prompt, GREEDY)).tokens)
                await until_async(lambda: all(all_written(ranks) for ranks in groups.groups.values()))
                first, second = groups.groups.values()
                wait_until_announced(first, second)
                wait_until_announced(second, first)
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
        until(lambda: rank.statistics()["sharing"].peers == 1, "connected")
        groups.kill("colocated-0")
        rank.peer_lost("colocated-0")
        until(lambda: not rank.statistics()["sharing"].peers, "forgotten")
        assert rank.statistics()["sharing"].lost_peers == 0
        rank.know_groups([groups.infos["colocated-2"]])


@pytest.mark.parametrize("loss_known", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_group_that_starts_again_under_the_same_name(checkpoints: Checkpoints, loss_known: bool) -> None:
    """Nothing of its earlier memory is known afterwards; both groups read from each other again."""
    source = checkpoints.source()
    other = random_prompts(90, seed=12)[0]
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in (PROMPTS[0], other)]
    with local_groups(two_groups(), source) as groups:
        assert serve_in_turn(groups) == [expected[0]] * 2
        (second,) = groups.groups["colocated-2"]
        epoch = groups.groups["colocated"][0].sharing.served.epoch
        groups.kill("colocated-0")
        first = groups.restart("colocated", loss_known=loss_known)
        assert first.sharing.served.epoch != epoch
        until(lambda: second.sharing.index.position("colocated-0").epoch != epoch, "the old index is gone")
        wait_until_announced([first], [second])
        wait_until_announced([second], [first])

        async def work(router: Router) -> list[list[int]]:
            tokens = []
            for number, prompt in enumerate([PROMPTS[0], PROMPTS[0], other, other]):  # groups 1, 2, 1, 2
                tokens.append((await ask(router, f"again-{number}", prompt, GREEDY)).tokens)
                await until_async(lambda: all(all_written(ranks) for ranks in groups.groups.values()))
                wait_until_announced([second], [first])
            return tokens

        assert groups.serve(work) == [expected[0], expected[0], expected[1], expected[1]]
        assert tier_of([first]).fetched_pages == PAGES, "read from the surviving group"
        assert tier_of([second]).fetched_pages == PAGES + len(other) // 16, "read from the new one"


@pytest.mark.parametrize("broken", ["colocated", "colocated-2"])
def test_a_transport_that_fails_is_replaced(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Of the group that serves, or that reads. Meanwhile reads are misses, afterwards pages are read again."""
    monkeypatch.setattr(renewed_exchange, "REOPEN_S", 0.2)
    source = checkpoints.source()
    expected = checkpoints.greedy(source, PROMPTS[0], TOKENS)
    with local_groups(two_groups(), source) as groups:
        (first,), (second,) = groups.groups.values()
        (failing,) = groups.groups[broken]

        def fail() -> list[Operation]:
            raise TransportError("a fence is not proven")

        def found() -> list[bool]:
            """What the second group finds of the first group's pages; a search must not wait for its limit."""
            began_s = time.monotonic()
            pages = second.sharing.storage.exists(first_parts(groups, PROMPTS[0]), 20.0)
            assert time.monotonic() - began_s < 10.0
            return pages

        async def work(router: Router) -> list[list[int]]:
            tokens = [(await ask(router, "r0", PROMPTS[0], GREEDY)).tokens]
            await until_async(lambda: all_written([first], PAGES))
            wait_until_announced([second], [first])
            assert found() == [True] * PAGES
            server, name = failing.sharing.server, f"{broken}-0-pages"
            with structlog.testing.capture_logs() as logs:
                groups.closed.add(name)
                groups.fabric.transports[name].progress = fail  # type: ignore[method-assign]
                failing.sharing.lost("nobody")  # wakes the thread
                until(lambda: "page_transport_not_opened" in events(logs), "cannot be opened")
                assert found() == [False] * PAGES, "reads are misses at once"
                failing.sharing.check()
                groups.closed.clear()
                until(lambda: failing.sharing.server != server, "another transport")
                for rank in (first, second):
                    until(lambda rank=rank: rank.sharing.statistics().peers == 1, "connected")  # type: ignore[misc]
            assert {"host_cache_not_shared", "host_cache_shared_again"} <= events(logs)
            until(lambda: found() == [True] * PAGES, "found again, after the pause of a breaker")
            tokens.append((await ask(router, "r1", PROMPTS[0], GREEDY)).tokens)
            return tokens

        assert groups.serve(work) == [expected] * 2
        assert tier_of([second]).fetched_pages == PAGES


def first_parts(groups: LocalGroups, prompt: list[int]) -> list[bytes]:
    """The key of the first part of each page of a prompt."""
    rank = groups.groups["colocated"][0]
    keys = page_keys(rank.group, groups.config, rank.group_config, rank.runner.spec)
    grid = part_grid(rank.group_config, rank.runner.spec)
    return keys.keys(keys.links(PrefixKey.of(prompt)), grid.kv_parts[:1])


def events(logs: Sequence[Any]) -> set[str]:
    return {line["event"] for line in logs}


def test_an_owner_that_dies_while_a_group_of_another_size_reads(checkpoints: Checkpoints) -> None:
    """Rank 0 may land its pages, rank 1 does not: none is used.

    The owner counts as dead: its process would have ended, but here it may find its transport closed in a next reply.
    """
    source, sampling = checkpoints.source(), SamplingParams(max_tokens=40, ignore_eos=True)
    answer = checkpoints.greedy(source, PROMPTS[0], 40)
    turn = [*PROMPTS[0], *answer, *PROMPTS[1][:5]]
    config = sharing(small_config(2, 1), "prefill", "decode", prefetch_base_s=0.5)
    with local_groups(config, source, dead=("decode-0",)) as groups:

        async def work(router: Router) -> list[list[int]]:
            first = await ask(router, "r0", PROMPTS[0], sampling)
            wait_until_written(groups.prefill, PAGES)
            wait_until_written(groups.decode, (100 + 40 - 1) // 16)
            wait_until_announced(groups.prefill, groups.decode)
            groups.fabric.faults.kill("decode-0-pages", nth=2, when=reply_to_rank_1)
            return [first.tokens, (await ask(router, "r1", turn, GREEDY)).tokens]

        def reply_to_rank_1(source: str, destination: str, tag: int) -> bool:
            return source == "decode-0-pages" and destination == "prefill-1-pages" and bool(tag >> 63)

        assert groups.serve(work) == [answer, checkpoints.greedy(source, turn, TOKENS)]
        assert groups.fabric.faults.all_struck
        assert tier_of(groups.prefill).fetched_pages == 0
