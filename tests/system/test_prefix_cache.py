"""The prefill group's prefix cache in the whole system: tokens stay exact, all bytes still cross, nothing leaks."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from aborted_answers import answers_with_aborts, check_survivors
from conditions import PATIENCE_S
from local_groups import Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from prefix_caches import cache_of, with_caches
from simulated_groups import Simulation
from simulated_memory import poison_pages
from slow_parameters import sampled

from disagg.core.prefixes import PrefixKey
from disagg.core.types import SamplingParams
from disagg.router.router import Router

TOKENS = 4
GREEDY = SamplingParams(max_tokens=TOKENS)


def alike(*tails: int, stem: int = 70, seed: int = 1) -> list[list[int]]:
    """Prompts of one beginning."""
    (common,) = random_prompts(stem, seed=seed)
    return [common + tail for tail in random_prompts(*tails, seed=seed + 1)]


def computed_tokens(groups: LocalGroups) -> list[int]:
    """A list that prompt tokens are added to as the prefill ranks' leader plans them."""
    counted = [0]
    scheduler = groups.prefill[0].leader.scheduler
    plan = scheduler.next_step

    def next_step() -> Any:
        found = plan()
        counted[0] += sum(len(work.tokens) for work in found.work) if found else 0
        return found

    scheduler.next_step = next_step
    return counted


@pytest.mark.parametrize("peer_memory", [False, True], ids=["staged", "written"])
@pytest.mark.parametrize("tp", [(1, 1), (2, 1), (1, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
def test_what_is_cached_is_sent_and_not_computed(
    checkpoints: Checkpoints, tp: tuple[int, int], peer_memory: bool
) -> None:
    """One after the other: the second prompt, and the first again, find the beginning; all bytes cross each time."""
    first, second = alike(20, 30)
    asked = [first, second, first, first[:64]]
    source = checkpoints.source()
    config = with_caches(small_config(*tp, peer_memory=peer_memory), decode=False)
    with local_groups(config, source) as groups:
        counted = computed_tokens(groups)

        async def work(router: Router) -> list[Any]:
            return [await ask(router, f"r{i}", prompt, GREEDY) for i, prompt in enumerate(asked)]

        answers = groups.serve(work)
        found = cache_of(groups.prefill)
    assert [a.tokens for a in answers] == [checkpoints.greedy(source, prompt, TOKENS) for prompt in asked]
    assert [a.report.cached_tokens for a in answers] == [0, 64, 80, 48]
    each = answers[0].report.nbytes // len(first)
    assert [a.report.nbytes for a in answers] == [each * len(prompt) for prompt in asked]
    assert counted[0] == len(first) + (len(second) - 64) + (len(first) - 80) + (64 - 48)
    assert (found.hits, found.misses, found.hit_tokens) == (3, 1, 64 + 80 + 48)


def test_switched_off_it_is_not_there(checkpoints: Checkpoints) -> None:
    prompts = alike(20, 30)
    source = checkpoints.source()
    with local_groups(with_caches(small_config(), prefill=False, decode=False), source) as groups:
        answers = groups.answers(prompts, GREEDY) + groups.answers(prompts, GREEDY)
        for ranks in (groups.prefill, groups.decode):
            memory = ranks[0].statistics()["leader"].memory
            assert memory.cache is None
            assert memory.pages.used_pages == 0
        assert [a.report.nbytes for a in answers[:2]] == [a.report.nbytes for a in answers[2:]]
    assert [a.tokens for a in answers] == 2 * [
        checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts
    ]


def test_salts_share_nothing(checkpoints: Checkpoints) -> None:
    (prompt,) = random_prompts(60)
    salts = ["", "a", "b", "a"]
    with local_groups(small_config(), checkpoints.source()) as groups:

        async def work(router: Router) -> list[list[int]]:
            answers = []
            for index, salt in enumerate(salts):
                outputs = router.generate(f"r{index}", prompt, GREEDY, timeout_s=PATIENCE_S, cache_salt=salt)
                answers.append([token async for output in outputs for token in output.tokens])
            return answers

        answers = groups.serve(work)
        found = cache_of(groups.prefill)
        source = groups.source
    assert answers == [checkpoints.greedy(source, prompt, TOKENS)] * len(salts)
    assert (found.hits, found.misses) == (1, 3)


@pytest.mark.parametrize(
    ("eviction", "peer_memory"),
    sampled(
        itertools.product(["lru", "fifo"], [False, True]),
        lambda eviction, peer_memory: (eviction == "lru") == peer_memory,
    ),
)
def test_sharing_under_a_pool_that_is_too_small_with_aborts(
    checkpoints: Checkpoints, eviction: str, peer_memory: bool
) -> None:
    """Freed pages are NaN. Three beginnings, more than the pool holds; a third of the requests is cancelled."""
    choose = random.Random(peer_memory)
    config = small_config(2, 1, pool_tokens=320, prefill_page=8, peer_memory=peer_memory)
    config = msgspec.structs.replace(
        config, prefill=msgspec.structs.replace(config.prefill, eviction=eviction)
    )
    stems = [alike(*(choose.randrange(1, 40) for _ in range(6)), stem=80, seed=seed) for seed in (3, 5, 7)]
    prompts = [stems[i % 3][i // 3] for i in range(18)]
    victims = {index: choose.randrange(1, 20) for index in range(0, 18, 3)}
    with local_groups(config, checkpoints.source()) as groups:
        poison_pages(groups.prefill[0].kv_manager, groups.prefill)
        results = answers_with_aborts(groups, prompts, GREEDY, victims)
        found, source = cache_of(groups.prefill), groups.source
    check_survivors(results, victims, lambda i: checkpoints.greedy(source, prompts[i], TOKENS))
    assert found.hit_tokens > 0
    assert found.evicted_pages > 0


@pytest.mark.parametrize("rank", ["prefill-0", "decode-0"])
def test_groups_cache_recurrent_states(rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill groups those of prompts, decode groups those of answers, for recomputation after a preemption."""
    simulation = Simulation(small_config(), 0, monkeypatch, states=True, any_chunks=True)
    assert simulation.ranks[rank].statistics()["leader"].memory.cache.free_states > 0


def test_long_and_short_prompts_share_nothing_where_the_rotary_embedding_changes() -> None:
    short, edge, long = (PrefixKey.of(range(count), "x", 10).salt for count in (3, 10, 11))
    assert short == edge != long
    assert PrefixKey.of(range(11), "x").salt == "x"
