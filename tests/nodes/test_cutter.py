"""What leaves for a decode group is cut by that group's layout: its bytes count on the wire, in ring and staging."""

from __future__ import annotations

import msgspec
import pytest

from disagg.core.config.read import Role
from disagg.core.errors import ConfigError, HandshakeError
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RankInfo, Shard, Span
from disagg.node.links import Link, make_link
from prefill_node.cutter import Cutter
from staging.shards import make_shards
from staging.wire import Wire

LAYOUT = KVLayout(layers=8, kv_heads=2, head_dim=128, dtype="bfloat16")
CELL_BYTES = 2 * 2 * (128 + 2)
"""K and V of a token in a layer, both heads, quantized; in bfloat16 it is 2 * 2 * 256."""
FREE = Wire(0.0, 1e9)
"""Segments cost nothing: one for each layer."""


def group(role: Role, dtype: str, ranks: int, ring_bytes: int = 1 << 20) -> GroupInfo:
    layout = msgspec.structs.replace(LAYOUT, dtype=dtype)

    def rank(shard: Shard) -> RankInfo:
        return RankInfo(shard.rank, shard, f"{role}-{shard.rank}", b"", ring_bytes)

    shards = make_shards(layout.layers, layout.kv_heads, ranks, 1)
    return GroupInfo(role, role, PROTOCOL_VERSION, "", layout, 16, "inproc", tuple(map(rank, shards)))


def link(dtype: str, ring_bytes: int = 1 << 20) -> Link:
    return make_link(group("prefill", "bfloat16", 1), group("decode", dtype, 1, ring_bytes))


def cutter(wire: Wire = FREE, limit_bytes: int = 1 << 20) -> Cutter:
    shard = Shard(0, Span(0, LAYOUT.layers), Span(0, LAYOUT.kv_heads))
    return Cutter(0, shard, 8, 1 << 20, limit_bytes, wire)


@pytest.mark.parametrize(("dtype", "bytes_of_256"), [("bfloat16", 256), ("int8", 130), ("float8_e5m2", 130)])
def test_segments_are_as_long_as_what_the_decode_group_stores(dtype: str, bytes_of_256: int) -> None:
    made, to = cutter(), link(dtype)
    made.link(to)
    segments = made.cut(to, Span(0, 100), {}, first_index=0)
    assert sum(segment.nbytes for segment in segments) == 100 * LAYOUT.token_bytes * bytes_of_256 // 256
    cell_bytes = CELL_BYTES if dtype != "bfloat16" else LAYOUT.token_bytes // LAYOUT.layers
    assert all(segment.nbytes % cell_bytes == 0 for segment in segments), "whole tokens of a layer"


def test_half_of_the_bytes_are_cut_half_as_often() -> None:
    """A limit for 16 quantized tokens of a layer holds 8 in bfloat16."""
    made = cutter(limit_bytes=16 * CELL_BYTES)
    counts = []
    for dtype in ("int8", "bfloat16"):
        to = link(dtype)
        made.link(to)
        counts.append(len(made.cut(to, Span(0, 64), {}, first_index=0)))
    assert counts == [8 * 64 // 16, 8 * 64 // 8]


def test_layer_groups_follow_from_bytes_on_the_wire() -> None:
    """With a second for each segment more and one byte a second, the root of the bytes that cross."""
    made = cutter(wire=Wire(overhead_s=1000.0, bytes_per_s=1.0))
    for tokens, dtype, groups in ((3, "bfloat16", 5), (3, "int8", 4), (6, "int8", 5), (40, "int8", 8)):
        assert len(made.groups_for(tokens, link(dtype))) == groups, (tokens, dtype)


def test_layers_that_a_decode_group_waits_for_leave_in_more_groups() -> None:
    shard, to = Shard(0, Span(0, LAYOUT.layers), Span(0, LAYOUT.kv_heads)), link("bfloat16")
    made = Cutter(0, shard, 2, 1 << 20, 1 << 20, FREE)
    made.link(to)
    usual, awaited = (
        made.cut(to, Span(0, 4), {}, awaited=awaited, first_index=3) for awaited in (False, True)
    )
    assert [segment.layers for segment in usual] == [Span(0, 4), Span(4, 8)]
    assert [segment.layers for segment in awaited] == [Span(layer, layer + 1) for layer in range(8)]
    assert [segment.index for segment in awaited] == [*range(3, 11)]


def test_a_ring_that_holds_a_token_of_codes_is_large_enough() -> None:
    link("int8", ring_bytes=CELL_BYTES)
    with pytest.raises(ConfigError, match=f"has {CELL_BYTES} bytes, but one token of one layer needs 1024"):
        link("bfloat16", ring_bytes=CELL_BYTES)
    with pytest.raises(ConfigError, match=f"one token of one layer needs {CELL_BYTES}"):
        link("int8", ring_bytes=CELL_BYTES - 1)


def test_staging_that_holds_a_token_of_codes_is_large_enough() -> None:
    shard = Shard(0, Span(0, LAYOUT.layers), Span(0, LAYOUT.kv_heads))
    Cutter(0, shard, 8, CELL_BYTES, CELL_BYTES, FREE).link(link("int8"))
    with pytest.raises(ConfigError, match="the staging buffer of prefill rank 0 has 520 bytes"):
        Cutter(0, shard, 8, CELL_BYTES, CELL_BYTES, FREE).link(link("bfloat16"))


def test_codes_are_not_turned_back() -> None:
    with pytest.raises(HandshakeError, match=r"element type: prefill has 'int8'.*decode groups alone may"):
        make_link(group("prefill", "int8", 1), group("decode", "bfloat16", 1))
