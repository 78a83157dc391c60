"""A shard holds exactly the layers and KV heads that its rank computes with."""

from __future__ import annotations

from itertools import product

import pytest

from disagg.core.errors import ConfigError
from disagg.core.types import Span
from staging.shards import make_shards, split


@pytest.mark.parametrize(
    ("kv_heads", "tp", "expected"),
    [
        (8, 2, [(0, 4), (4, 8)]),
        (2, 4, [(0, 1), (0, 1), (1, 2), (1, 2)]),
        (1, 3, [(0, 1), (0, 1), (0, 1)]),
        (4, 3, [(0, 2), (1, 3), (2, 4)]),
        (2, 3, [(0, 1), (0, 2), (1, 2)]),
    ],
)
def test_heads_split_replicated_and_uneven(kv_heads: int, tp: int, expected: list[tuple[int, int]]) -> None:
    assert [(s.heads.start, s.heads.stop) for s in make_shards(1, kv_heads, tp)] == expected


def test_a_rank_has_every_kv_head_of_its_query_heads_and_no_other() -> None:
    for kv_heads, tp in product(range(1, 17), range(1, 17)):
        query_heads = kv_heads * tp  # divides by both
        share = query_heads // tp
        for shard in make_shards(1, kv_heads, tp):
            mine = range(shard.rank * share, (shard.rank + 1) * share)
            assert set(shard.heads) == {head * kv_heads // query_heads for head in mine}


def test_ranks_are_numbered_stage_by_stage() -> None:
    shards = make_shards(layers=5, kv_heads=4, tp=2, pp=2)
    assert [shard.rank for shard in shards] == [0, 1, 2, 3]
    assert [shard.layers for shard in shards] == [Span(0, 2), Span(0, 2), Span(2, 5), Span(2, 5)]
    assert [shard.heads for shard in shards] == [Span(0, 2), Span(2, 4)] * 2


def test_split_is_balanced_and_complete() -> None:
    for start, length, parts in product((0, 7), range(12), range(1, 9)):
        spans = split(Span(start, start + length), parts)
        assert [i for span in spans for i in span] == list(range(start, start + length))
        assert max(map(len, spans)) - min(map(len, spans)) <= 1


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 1, 1, 1), "layers must be at least 1"),
        ((1, 0, 1, 1), "kv_heads must be at least 1"),
        ((1, 1, 0, 1), "tp must be at least 1"),
        ((1, 1, 1, -1), "pp must be at least 1; got -1"),
        ((3, 1, 1, 4), "pp=4 stages need at least as many layers; the model has 3"),
    ],
)
def test_impossible_sizes(sizes: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_shards(*sizes)
