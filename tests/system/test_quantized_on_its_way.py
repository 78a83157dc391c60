"""Prefill groups with KV in floats, decode groups with KV in 8 bits: what lands, and everything that goes on with it.

What is equal, and to what:

- what lands in a decode pool is what the prefill pool has, quantized: bit for bit what the decode pool's own write
  would have made of it;
- so all tokens are those of an engine that prefills in floats, quantizes, and decodes (`disagg.reference.answers`);
- they are not those of groups that both have 8 bits: there the prompt's own attention reads quantized
  values, so all layers but the first compute other K and V.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import local_groups as support
import msgspec
import pytest
import torch
from local_groups import Answered, Checkpoints, LocalGroups, ask, local_groups, random_prompts, small_config
from prefix_caches import cache_of, with_caches
from simulated_memory import poison_host, poison_pages
from slow_parameters import sampled

from disagg.bench.handoff.ranks import TimedDecodeRank, TimedPrefillRank
from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import RequestKey, SamplingParams, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool
from disagg.model.load.source import ModelSource
from disagg.reference.answers import reference_answers
from disagg.router.router import Router

TOKENS = 6
GREEDY = SamplingParams(max_tokens=TOKENS)
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def quantizing(config: Config, source: ModelSource, kv_dtype: str = "int8") -> Config:
    """`config` with quantized KV in the decode groups alone."""
    decode = msgspec.structs.replace(config.decode, kv_dtype=kv_dtype)
    model = ModelConfig(path=str(source.directory), dtype="float32")
    return msgspec.structs.replace(config, decode=decode, model=model)


@pytest.fixture
def pages_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that remember where the KV of a request lies."""
    monkeypatch.setitem(support.RANKS, "prefill", TimedPrefillRank)
    monkeypatch.setitem(support.RANKS, "decode", TimedDecodeRank)


def slots_on(rank: Any, tokens: Span) -> torch.Tensor:
    pages = rank.pages_of(RequestKey("r0"))
    return slots_of(pages, rank.runner.page_size, tokens).long().to(rank.runner.device)


def held(ranks: Sequence[Any], tokens: Span) -> Iterator[tuple[int, int, int, torch.Tensor]]:
    """Rank, global layer and head, and the bytes that its pool has of them, `[1, tokens, bytes of a head]`.

    Of the request that was asked alone, last: nobody has taken its pages since.
    """
    for rank in ranks:
        shard, slots = rank.runner.shard, slots_on(rank, tokens)
        rows = rank.runner.pool.buffer.view(torch.uint8)[:, :, slots].cpu()
        for i, layer in enumerate(shard.layers):
            yield from ((rank.rank, layer, head, rows[i, :, :, j]) for j, head in enumerate(shard.heads))


def as_written(rank: Any, tokens: Span, kv_dtype: str) -> dict[tuple[int, int], torch.Tensor]:
    """The content of a quantized pool to which a CPU wrote a prefill rank's K and V, by layer and head."""
    shard, slots, pool = rank.runner.shard, slots_on(rank, tokens), rank.runner.pool
    found: dict[tuple[int, int], torch.Tensor] = {}
    for i, layer in enumerate(shard.layers):
        quantized = MHATokenToKVPool(1, len(tokens), pool.heads, pool.head_dim, getattr(torch, kv_dtype))
        quantized.write(0, torch.arange(len(tokens)), *(t.cpu() for t in pool.read(i, slots, torch.float32)))
        found |= {(layer, head): quantized.buffer[0, :, :, j] for j, head in enumerate(shard.heads)}
    return found


def check_bytes(groups: LocalGroups, tokens: Span, kv_dtype: str) -> None:
    """Every decode rank has what some prefill rank that holds the head computed, quantized."""
    sources = [as_written(rank, tokens, kv_dtype) for rank in groups.prefill]
    for rank, layer, head, found in held(groups.decode, tokens):
        computed = [each[layer, head] for each in sources if (layer, head) in each]
        assert any(torch.equal(found, one) for one in computed), f"decode r{rank}, layer {layer}, head {head}"


LANDINGS = [
    ("int8", (1, 1), (16, 16), 1 << 20, True),
    ("int8", (3, 2), (16, 1), 4096, False),
    ("float8_e4m3fn", (2, 3), (1, 16), 1 << 20, False),
    ("float8_e5m2", (1, 2), (4, 8), 4096, True),
]
"""Those of the sample; `make test-slow` takes the other way with each, staged or written."""


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kv_dtype", "tp", "pages", "ring_bytes", "peer_memory"),
    sampled(
        [(*landing[:4], way) for landing in LANDINGS for way in (False, True)],
        lambda *landing: landing in LANDINGS,
    ),
    ids=str,
)
@pytest.mark.usefixtures("pages_known")
def test_what_lands_is_what_was_computed_quantized(
    checkpoints: Checkpoints,
    kv_dtype: str,
    tp: tuple[int, int],
    pages: tuple[int, int],
    ring_bytes: int,
    peer_memory: bool,
    device: str,
) -> None:
    source, prompts = checkpoints.source(), random_prompts(5, 61, 50, seed=1)
    config = small_config(*tp, prefill_page=pages[0], decode_page=pages[1], ring_bytes=ring_bytes)
    transport = msgspec.structs.replace(config.transport, peer_memory=peer_memory)
    config = quantizing(msgspec.structs.replace(config, transport=transport), source, kv_dtype)
    with local_groups(with_caches(config, prefill=False, decode=False), source, device) as groups:
        for prompt in prompts:
            (answer,) = groups.answers([prompt], GREEDY)
            assert answer.tokens[0] == checkpoints.greedy(source, prompt, 1)[0], "computed in floats"
            check_bytes(groups, Span(0, len(prompt)), kv_dtype)
        transfer = [rank.statistics()["transfer"] for rank in groups.prefill]
        shards, head_bytes = (rank.runner.shard for rank in groups.decode), 8 + 2
    cells = sum(len(shard.layers) * len(shard.heads) for shard in shards)
    assert sum(one.bytes_sent for one in transfer) == sum(map(len, prompts)) * cells * 2 * head_bytes
    assert all((one.segments_written > 0) == peer_memory for one in transfer)


@pytest.mark.usefixtures("pages_known")
def test_groups_that_both_have_codes_compute_other_kv(checkpoints: Checkpoints) -> None:
    """The first layer's K and V are computed before any attention, so they are the same; the second's are not."""
    source, (prompt,) = checkpoints.source(), random_prompts(40, seed=2)
    mixed = quantizing(small_config(), source)
    both = msgspec.structs.replace(mixed, model=msgspec.structs.replace(mixed.model, kv_dtype="int8"))
    found = []
    for config in (mixed, both):
        with local_groups(config, source) as groups:
            groups.answers([prompt], GREEDY)
            kv = {layer: rows for _, layer, head, rows in held(groups.decode, Span(0, 40)) if head == 0}
            found.append(kv)
    assert [torch.equal(found[0][layer], found[1][layer]) for layer in range(2)] == [True, False]


@pytest.mark.parametrize(
    ("prefill", "decode", "peer_memory"),
    sampled(
        [(*caches, way) for caches in ((True, True), (True, False), (False, True)) for way in (False, True)],
        lambda prefill, decode, peer_memory: (prefill and decode) == peer_memory,
    ),
)
@pytest.mark.usefixtures("pages_known")
def test_either_prefix_cache_and_both(
    checkpoints: Checkpoints, prefill: bool, decode: bool, peer_memory: bool
) -> None:
    """What is cached is floats on the one side and quantized on the other; what is sent again is quantized again."""
    source, (stem,) = checkpoints.source(), random_prompts(50, seed=3)
    prompts = [stem + tail for tail in random_prompts(3, 30, 14, seed=4)]
    config = small_config(2, 1, prefill_page=4, decode_page=16, peer_memory=peer_memory)
    config = quantizing(with_caches(config, prefill=prefill, decode=decode), source)
    expected = reference_answers(config, prompts, GREEDY, lambda: None).answers
    sent: list[int] = []
    with local_groups(config, source) as groups:
        for _ in range(2):
            sent.append(0)
            for prompt, tokens in zip(prompts, expected, strict=True):
                (answer,) = groups.answers([prompt], GREEDY)
                assert answer.tokens == tokens
                check_bytes(groups, Span(0, len(prompt)), "int8")
                sent[-1] += answer.report.nbytes
        hits = [cache_of(ranks).hits for ranks in (groups.prefill, groups.decode) if _caches(ranks)]
        token_bytes = groups.decode_info.layout.token_bytes
    assert all(count >= 3 for count in hits)
    lacking = sum(len(prompt) - (len(prompt) - 1) // 16 * 16 for prompt in prompts)
    assert sent[1] == (lacking if decode else sum(map(len, prompts))) * token_bytes


def _caches(ranks: Sequence[Any]) -> bool:
    return ranks[0].statistics()["leader"].memory.cache is not None


PROMPTS = random_prompts(9, 21, 14, 30, 5, 17, seed=6)
DRAWN = SamplingParams(max_tokens=12, n=3, temperature=1.2, seed=3, min_tokens=12)
LONG = SamplingParams(max_tokens=40, ignore_eos=True)
SAMPLINGS = [
    SamplingParams(max_tokens=12, beams=3, n=3, ignore_eos=True),
    DRAWN,
    LONG,
    SamplingParams(max_tokens=10, beams=4, n=1, ignore_eos=True),
    msgspec.structs.replace(DRAWN, n=2, seed=4, repetition_penalty=1.2),
    LONG,
]


def all_at_once(groups: LocalGroups, samplings: Sequence[SamplingParams]) -> list[list[list[int]]]:
    async def work(router: Router) -> list[Answered]:
        asked = zip(PROMPTS, samplings, strict=True)
        return await asyncio.gather(*(ask(router, f"r{i}", p, s) for i, (p, s) in enumerate(asked)))

    return [answer.report.answers for answer in groups.serve(work)]


@pytest.mark.parametrize(
    ("tp", "peer_memory"),
    sampled(
        itertools.product([(1, 1), (2, 2)], [False, True]),
        lambda tp, peer_memory: peer_memory == (tp == (2, 2)),
    ),
    ids=str,
)
def test_forks_and_swapped_pages_of_quantized_kv(
    checkpoints: Checkpoints, tp: tuple[int, int], peer_memory: bool
) -> None:
    """Beams, several answers and single ones, by turns in host memory: the answers of a pool with room for all.

    By swap: who is computed again reads quantized values in the prompt's attention, which the prefill group did not.
    """
    source = checkpoints.source()
    roomy = small_config(*tp, prefill_page=16, decode_page=4, peer_memory=peer_memory, max_requests=16)
    roomy = quantizing(roomy, source)
    with local_groups(roomy, source) as groups:
        calm = all_at_once(groups, SAMPLINGS)
    several = msgspec.structs.replace(DRAWN, n=1)
    with local_groups(with_caches(roomy, decode=False), source) as groups:
        assert all_at_once(groups, [LONG, several, LONG, LONG, several, LONG])[1] == calm[1][:1], (
            "as if alone"
        )
    decode = msgspec.structs.replace(
        roomy.decode,
        pool_tokens=96,
        max_context_tokens=96,
        preemption="swap",
        swap_bytes=4 << 20,
        watermark=0.0,
    )
    with local_groups(msgspec.structs.replace(roomy, decode=decode), source) as groups:
        scheduler = groups.decode[0].leader.scheduler
        poison_pages(groups.decode[0].kv_manager, groups.decode)
        poison_host(scheduler, groups.decode)
        for _ in range(12):  # who meets whom is up to the threads
            assert all_at_once(groups, SAMPLINGS) == calm
            found = groups.decode[0].statistics()["leader"]
            if found.swapped_total >= 3:
                break
    assert found.swapped_total >= 3
    assert found.recomputed_total == 0


def test_greedy_answers_beside_drawn_ones_are_the_references(checkpoints: Checkpoints) -> None:
    source = checkpoints.source()
    config = quantizing(small_config(1, 2, prefill_page=8, decode_page=2), source)
    expected = reference_answers(
        config, PROMPTS, msgspec.structs.replace(LONG, ignore_eos=False), lambda: None
    )
    with local_groups(config, source) as groups:
        answers = all_at_once(groups, [msgspec.structs.replace(LONG, n=2)] * len(PROMPTS))
    for answer, wanted in zip(answers, expected.answers, strict=True):
        assert [one[: len(wanted)] for one in answer] == [wanted] * 2
