"""Models with recurrent layers, through the whole system: their state moves with the KV, and tokens stay exact."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from architectures import HYBRIDS, MORE_HYBRIDS, hybrid, save
from local_groups import Checkpoints, local_groups, random_prompts, small_config
from slow_parameters import sampled

from disagg.core.types import SamplingParams
from disagg.model.load.source import ModelSource


@pytest.fixture(scope="module")
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    return ModelSource.from_directory(save(hybrid(request.param), tmp_path_factory.mktemp("model")))


SIZES = [((1, 1), (16, 4)), ((2, 1), (4, 16)), ((1, 2), (1, 8)), ((2, 2), (16, 16))]
"""`tp` and page size of both groups."""
MODELS = list(HYBRIDS)


def in_diagonals(source: str, sizes: tuple[tuple[int, int], ...], peer_memory: bool) -> bool:
    """Chooses for each model one of the sizes; a size that several models have, with and without peer memory."""
    turn = MODELS.index(source)
    return SIZES.index(sizes) == turn % len(SIZES) and peer_memory == bool((turn + turn // len(SIZES)) % 2)


@pytest.mark.parametrize(
    ("source", "sizes", "peer_memory"),
    sampled(itertools.product(MODELS, SIZES, (False, True)), in_diagonals),
    indirect=["source"],
)
def test_tokens_are_those_of_generate(
    source: ModelSource,
    sizes: tuple[tuple[int, int], tuple[int, int]],
    peer_memory: bool,
    checkpoints: Checkpoints,
) -> None:
    tp, pages = sizes
    config = small_config(
        *tp, prefill_page=pages[0], decode_page=pages[1], max_requests=3, peer_memory=peer_memory
    )
    prompts = random_prompts(
        5, 1, 49, 24, 90
    )  # more than there are rows; 49 leaves one token over two chunks
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=8))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]


@pytest.mark.parametrize(
    ("source", "chunk_tokens"),
    sampled(
        itertools.product([f"{name}/3" for name in HYBRIDS | MORE_HYBRIDS], (1, 13, 64)),
        lambda source, chunk_tokens: (source, chunk_tokens) == ("bamba/3", 13),
    ),
    indirect=["source"],
)
def test_three_ranks_send_to_two(source: ModelSource, chunk_tokens: int, checkpoints: Checkpoints) -> None:
    config = small_config(3, 2, prefill_page=8, decode_page=4, chunk_tokens=chunk_tokens, max_requests=3)
    prompts = random_prompts(5, 1, 49, 24)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=8))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 8) for p in prompts]


@pytest.mark.parametrize("tp", [(2, 1), (1, 2)], ids=lambda tp: f"{tp[0]}to{tp[1]}")
@pytest.mark.parametrize("source", ["minimax"], indirect=True)
def test_a_cache_of_the_model_s_own_class(
    source: ModelSource, tp: tuple[int, int], checkpoints: Checkpoints
) -> None:
    config = small_config(*tp, prefill_page=4, decode_page=16)
    prompts = random_prompts(5, 1, 41, 90)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=12))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 12) for p in prompts]


@pytest.mark.parametrize("source", ["falcon-h1"], indirect=True)
def test_a_state_goes_through_a_ring_smaller_than_itself(
    source: ModelSource, checkpoints: Checkpoints
) -> None:
    config = small_config(2, 1, ring_bytes=8448)
    prompts = random_prompts(30, 12)
    with local_groups(config, source) as groups:
        answers = groups.answers(prompts, SamplingParams(max_tokens=4))
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 4) for p in prompts]


@pytest.mark.parametrize("source", ["falcon-h1"], indirect=True)
def test_a_state_needs_no_room_of_the_pool(source: ModelSource, checkpoints: Checkpoints) -> None:
    config = small_config(1, 1)
    for name in ("prefill", "decode"):
        group = msgspec.structs.replace(getattr(config, name), pool_tokens=64, max_context_tokens=64)
        config = msgspec.structs.replace(config, **{name: group})
    (prompt,) = random_prompts(60)
    with local_groups(config, source) as groups:
        (answer,) = groups.answers([prompt], SamplingParams(max_tokens=4))
        assert (
            groups.prefill[0].runner.spec.layout.state_bytes > 4 * groups.prefill[0].runner.pool.nbytes / 80
        )
    assert answer.tokens == checkpoints.greedy(source, prompt, 4)
