"""Tickets whose layer classes begin at positions of their own, and page tables of classes."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from decode_node.coverage import Coverage
from disagg.core.errors import ProtocolError
from disagg.core.types import (
    PROTOCOL_VERSION,
    GroupInfo,
    KVLayout,
    LayerClass,
    RankInfo,
    RequestKey,
    Segment,
    Span,
    Ticket,
)
from disagg.kv.page_tables import PageTables, table_slots
from disagg.node.links import Link, make_link
from prefill_node.cutter import Cutter
from staging.shards import layout_shards
from staging.wire import Wire

LAYOUT = KVLayout(2, 4, 8, "float16", more=(LayerClass(3, 4, 8),))
TOKENS, STARTS = Span(10, 60), (10, 45)


def group(role: str, ranks: int) -> GroupInfo:
    infos = tuple(
        RankInfo(shard.rank, shard, f"{role}-{shard.rank}", b"", 1 << 20)
        for shard in layout_shards(LAYOUT, ranks)
    )
    return GroupInfo(role, role, PROTOCOL_VERSION, "", LAYOUT, 16, "inproc", infos)


def cut(link: Link, chunks: Sequence[Span]) -> list[Segment]:
    """Segments of a prompt's chunks from the only prefill rank."""
    cutter = Cutter(0, layout_shards(LAYOUT, 1)[0], 2, 1 << 20, 1 << 20, Wire(0.0, 1e9))
    cutter.link(link)
    found: list[Segment] = []
    for chunk in chunks:
        found += cutter.cut(link, chunk.intersect(TOKENS), {}, first_index=len(found), starts=STARTS)
    return found


@pytest.mark.parametrize("chunks", [[Span(0, 60)], [Span(0, 30), Span(30, 50), Span(50, 60)]])
def test_segments_cover_each_class_from_its_start(chunks: list[Span]) -> None:
    link = make_link(group("prefill", 1), group("decode", 2))
    segments = cut(link, chunks)
    assert [segment.index for segment in segments] == list(range(len(segments)))
    for rank in (0, 1):
        own = [segment for segment in segments if segment.dst_rank == rank]
        coverage = Coverage(link.to_rank(rank), TOKENS, LAYOUT, STARTS)
        for segment in own:
            coverage.add(segment)
        cells = (2 * 50 + 3 * 15) * 2
        assert sum(segment.nbytes for segment in own) == coverage.total_bytes == cells * 2 * 8 * 2
        assert coverage.whole_tokens(own) == 50
        assert coverage.whole_tokens([one for one in own if one.layers.start < 2]) == 35
        assert coverage.whole_tokens([one for one in own if one.layers.start >= 2]) == 0


def test_a_segment_before_the_start_of_its_class_is_refused() -> None:
    link = make_link(group("prefill", 1), group("decode", 1))
    (first,) = [one for one in cut(link, [Span(0, 60)]) if one.layers.start == 2]
    early = msgspec.structs.replace(first, tokens=Span(44, 60), nbytes=first.nbytes // len(first.tokens) * 16)
    with pytest.raises(ProtocolError, match="exceeds the ticket"):
        Coverage(link.to_rank(0), TOKENS, LAYOUT, STARTS).add(early)


def test_starts_of_other_classes_are_refused() -> None:
    ticket = Ticket(RequestKey("r"), 1, "d", TOKENS, starts=(0, 0, 0))
    with pytest.raises(ValueError, match="3 layer classes, not of 2"):
        ticket.check_starts(LAYOUT)


def test_each_class_has_the_slots_of_its_table() -> None:
    tables = PageTables((4, 2), (1, 0, 1))
    slots = table_slots(tables, [[5, 2], [0, 9, 7]], Span(3, 6))
    assert [one.tolist() for one in slots] == [[23, 8, 9], [19, 14, 15]]
    assert [one.tolist() for one in tables.by_class(slots, 3)] == [[19, 14, 15], [23, 8, 9], [19, 14, 15]]
    with pytest.raises(ValueError, match="1 page tables, not 2"):
        table_slots(tables, [[5, 2]], Span(0, 6))
    with pytest.raises(ValueError, match="beyond 2 pages of 2 tokens"):
        table_slots(tables, [[5, 2], [0, 9]], Span(0, 6))
