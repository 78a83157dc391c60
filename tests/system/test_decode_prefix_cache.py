"""The decode group's prefix cache in the whole system: what it holds is not sent, tokens stay exact."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import pytest
from aborted_answers import answers_with_aborts, check_survivors
from conditions import PATIENCE_S, until_async
from local_groups import Checkpoints, ask, local_groups, random_prompts, small_config
from prefix_caches import cache_of, with_caches
from simulated_memory import poison_pages
from slow_parameters import sampled

from disagg.core.types import SamplingParams
from disagg.router.router import Router

TOKENS = 5
GREEDY = SamplingParams(max_tokens=TOKENS)


async def conversation(
    router: Router, first: list[int], turns: list[list[int]]
) -> list[tuple[list[int], Any]]:
    """Each turn's prompt is all that was said before, and more. Returns prompts with their answers."""
    said, prompt = [], first
    for index, more in enumerate([*turns, []]):
        answer = await ask(router, f"{first[0]}-{index}", prompt, GREEDY)
        said.append((prompt, answer))
        prompt = [*prompt, *answer.tokens, *more]
    return said


TURNS = [((1, 1), (16, 16)), ((2, 1), (16, 4)), ((1, 2), (4, 16)), ((2, 3), (8, 2)), ((3, 2), (16, 1))]


@pytest.mark.parametrize(
    ("tp", "pages", "peer_memory"),
    sampled(
        ((*sizes, peer_memory) for sizes in TURNS for peer_memory in (False, True)),
        lambda tp, pages, peer_memory: peer_memory == TURNS.index((tp, pages)) % 2,
    ),
    ids=str,
)
def test_turns_of_a_conversation_bring_only_what_is_new(
    checkpoints: Checkpoints, tp: tuple[int, int], pages: tuple[int, int], peer_memory: bool
) -> None:
    """Prompt and answer are kept in whole pages; the token that was chosen last has no KV yet."""
    first, *turns = random_prompts(53, 9, 1, 40, seed=2)
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], peer_memory=peer_memory)
    with local_groups(config, checkpoints.source()) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        said = groups.serve(lambda router: conversation(router, first, turns))
        found, source = cache_of(groups.decode), groups.source
    for prompt, answer in said:
        assert answer.tokens == checkpoints.greedy(source, prompt, TOKENS)
    each = said[0][1].report.nbytes // len(first)
    known = [0] + [(len(prompt) + TOKENS - 1) // pages[1] * pages[1] for prompt, _ in said]
    missing = [len(prompt) - have for (prompt, _), have in zip(said, known, strict=False)]
    assert [answer.report.nbytes for _, answer in said] == [each * tokens for tokens in missing]
    assert (found.hits, found.misses, found.hit_tokens) == (3, 1, sum(known[:4]))


@pytest.mark.parametrize(
    ("prefill", "decode", "chunk_tokens"),
    sampled(
        itertools.product([True, False], [True, False], [7, 64]),
        lambda prefill, decode, chunk_tokens: (
            (prefill or decode) and (prefill == decode) == (chunk_tokens == 7)
        ),
    ),
)
def test_either_cache_alone_and_both(
    checkpoints: Checkpoints, prefill: bool, decode: bool, chunk_tokens: int
) -> None:
    """What one side has the other may lack: computed but not sent, sent but not computed; at once, and again."""
    (stem,) = random_prompts(50, seed=3)
    prompts = [stem + tail for tail in random_prompts(3, 30, 14, 60, seed=4)]
    config = small_config(2, 1, prefill_page=4, chunk_tokens=chunk_tokens)
    with local_groups(with_caches(config, prefill=prefill, decode=decode), checkpoints.source()) as groups:
        answers = [groups.answers(prompts, GREEDY) for _ in range(2)]
        source = groups.source
    expected = [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]
    assert [[a.tokens for a in each] for each in answers] == [expected, expected]
    first, again = (sum(a.report.nbytes for a in each) for each in answers)
    assert (again < first / 4) == decode


def test_a_prompt_that_is_held_whole_brings_its_last_tokens(checkpoints: Checkpoints) -> None:
    """A ticket is never empty: what says that the prompt has landed is a segment of it."""
    (prompt,) = random_prompts(64)
    with local_groups(small_config(), checkpoints.source()) as groups:

        async def work(router: Router) -> list[Any]:
            return [await ask(router, f"r{i}", prompt, GREEDY) for i in range(2)]

        first, again = groups.serve(work)
        source = groups.source
    assert first.tokens == again.tokens == checkpoints.greedy(source, prompt, TOKENS)
    assert again.report.nbytes == first.report.nbytes / 64 * 16


def test_salts_are_kept_apart_on_both_sides(checkpoints: Checkpoints) -> None:
    (prompt,) = random_prompts(60)
    with local_groups(small_config(), checkpoints.source()) as groups:

        async def work(router: Router) -> None:
            for index, salt in enumerate(["", "a", "b", "a"]):
                outputs = router.generate(f"r{index}", prompt, GREEDY, timeout_s=PATIENCE_S, cache_salt=salt)
                assert [output async for output in outputs]

        groups.serve(work)
        found = cache_of(groups.decode)
    assert (found.hits, found.misses, found.hit_tokens) == (1, 3, 48)


def versions(router: Router) -> int:
    """Changes with each report about the pages that a group holds."""
    return sum(engine.held.version or 0 for engine in router.engines)


def test_who_decodes_is_chosen_by_what_it_holds(checkpoints: Checkpoints) -> None:
    """Without a session's name too: the next turn finds the group that has the last one. Each brings a new mark."""
    config = small_config(1, 1, groups=(1, 3), metrics_interval_s=0.02)
    conversations = [
        (first, random_prompts(40, 50, seed=first[0])) for first in random_prompts(100, 90, 110, seed=6)
    ]
    with local_groups(config, checkpoints.source()) as groups:

        async def work(router: Router) -> list[set[str]]:
            homes = []
            for first, turns in conversations:
                prompt, used = first, set()
                for index, more in enumerate([*turns, []]):
                    before = versions(router)
                    answer = await ask(router, f"{first[0]}-{index}", prompt, SamplingParams(max_tokens=30))
                    used.add(answer.report.decode)
                    prompt = [*prompt, *answer.tokens, *more]
                    await until_async(lambda before=before: versions(router) != before)  # type: ignore[misc]
                homes.append(used)
            return homes

        homes = groups.serve(work)
    assert all(len(home) == 1 for home in homes)
    assert len(set.union(*homes)) == 3


@pytest.mark.parametrize(
    ("preemption", "peer_memory"),
    [
        ("recompute", True),
        ("swap", False),
        pytest.param("recompute", False, marks=pytest.mark.slow),
        pytest.param("swap", True, marks=pytest.mark.slow),
    ],
)
def test_sharing_in_a_pool_that_is_too_small_with_aborts(
    checkpoints: Checkpoints, peer_memory: bool, preemption: str
) -> None:
    """Freed pages are NaN. Answers outgrow the pool, a quarter is cancelled; what is cached goes before anyone."""
    choose = random.Random(peer_memory)
    config = small_config(1, 2, pool_tokens=320, decode_page=8, peer_memory=peer_memory)
    decode = msgspec.structs.replace(
        config.decode, pool_tokens=168, max_context_tokens=160, preemption=preemption, swap_bytes=1 << 20
    )
    config = msgspec.structs.replace(config, decode=decode)
    stems = random_prompts(48, 48, seed=8)
    prompts = [stems[i % 2] + random_prompts(choose.randrange(1, 20), seed=i)[0] for i in range(12)]
    sampling = SamplingParams(max_tokens=40)
    victims = {index: choose.randrange(1, 30) for index in range(0, 12, 4)}
    with local_groups(config, checkpoints.source()) as groups:
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        results = answers_with_aborts(groups, prompts, sampling, victims)
        found, source = cache_of(groups.decode), groups.source
    check_survivors(results, victims, lambda i: checkpoints.greedy(source, prompts[i], 40))
    assert found.hit_tokens > 0
    assert found.evicted_pages > 0
