"""Real bytes, from source pools through a staging ring into poisoned destination pools."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
import torch
from slow_parameters import sampled

from disagg.core.types import KVLayout, Segment, Shard, Span
from kernels.copy.gather import gather
from kernels.copy.scatter import scatter
from staging.allocator import StagingAllocator
from staging.buffer import StagingBuffer
from staging.planner import layer_groups, plan_segments
from staging.routes import plan_routes
from staging.shards import make_shards

torch.set_num_threads(1)

LAYERS, TOKENS, HEAD_DIM = 5, 7, 3
SENT = Span(2, TOKENS)  # the destination caches the first tokens already
SRC_SLOTS, DST_SLOTS = 11, 13
ALIGNMENT_BYTES = 16
RING_BYTES = 128  # less than a request, a rank's share of it, or a layer group of most
POISON = 0xEE


def source_pool(model: torch.Tensor, shard: Shard, slots: torch.Tensor) -> torch.Tensor:
    """The shard's part of `model` [layers, 2, tokens, heads, head_dim], at `slots`; noise elsewhere."""
    part = model[shard.layers.start : shard.layers.stop, :, :, shard.heads.start : shard.heads.stop]
    shape = (len(shard.layers), 2, SRC_SLOTS, len(shard.heads), HEAD_DIM)
    pool = torch.randint(0, 256, shape, dtype=torch.uint8)
    pool[:, :, slots] = part
    return pool


def destination_pool(shard: Shard) -> torch.Tensor:
    shape = (len(shard.layers), 2, DST_SLOTS, len(shard.heads), HEAD_DIM)
    return torch.full(shape, POISON, dtype=torch.uint8)


def local(segment: Segment, shard: Shard) -> tuple[Span, Span]:
    return segment.layers.shift(-shard.layers.start), segment.heads.shift(-shard.heads.start)


class Receiver:
    """A destination rank: a poisoned pool and a ring."""

    def __init__(self, shard: Shard, slots: torch.Tensor) -> None:
        self.shard = shard
        self.slots = slots
        self.pool = destination_pool(shard)
        self.ring = StagingAllocator(RING_BYTES, ALIGNMENT_BYTES)
        self.buffer = StagingBuffer(RING_BYTES, "cpu", poison=POISON)

    def receive(self, segment: Segment, source: Shard, pool: torch.Tensor, slots: torch.Tensor) -> None:
        """Gathers straight into this rank's ring (the wire is not under test) and scatters from there."""
        lease = self.ring.assign(segment.nbytes, segment.src_rank)
        assert self.ring.writable(lease)
        staged = self.buffer.view(self.ring.offset(lease), lease.nbytes)
        tokens = slice(segment.tokens.start, segment.tokens.stop)
        gather(pool, slots[tokens], *local(segment, source), staged)
        scatter(staged, self.pool, self.slots[tokens], *local(segment, self.shard))
        self.ring.free(lease.id)

    def expected(self, model: torch.Tensor) -> torch.Tensor:
        pool = destination_pool(self.shard)
        tokens = slice(SENT.start, SENT.stop)
        layers, heads = self.shard.layers, self.shard.heads
        pool[:, :, self.slots[tokens]] = model[
            layers.start : layers.stop, :, tokens, heads.start : heads.stop
        ]
        return pool


def move(model: torch.Tensor, src: Sequence[Shard], dst: Sequence[Shard], group_count: int) -> None:
    layout = KVLayout(LAYERS, model.shape[3], HEAD_DIM, "uint8")
    routes = plan_routes(src, dst)
    limits = {shard.rank: RING_BYTES for shard in dst}
    segments = plan_segments(routes, layout, SENT, layer_groups(Span(0, LAYERS), group_count), limits)
    src_slots = [torch.randperm(SRC_SLOTS)[:TOKENS] for _ in src]
    pools = [source_pool(model, shard, slots) for shard, slots in zip(src, src_slots, strict=True)]
    receivers = [Receiver(shard, torch.randperm(DST_SLOTS)[:TOKENS].int()) for shard in dst]
    for segment in segments:
        rank = segment.src_rank
        receivers[segment.dst_rank].receive(segment, src[rank], pools[rank], src_slots[rank])
    for receiver in receivers:
        assert torch.equal(receiver.pool, receiver.expected(model)), (src, dst, receiver.shard)


TP, PP = range(1, 9), range(1, 5)
PP_PAIRS = list(product(PP, PP))


def in_sample(kv_heads: int, tps: tuple[int, int], pps: tuple[int, int]) -> bool:
    """One of the 16 pairs of pipeline sizes for each pair of TP sizes; another one for the next number of heads."""
    return (PP_PAIRS.index(pps) - kv_heads - tps[0] - 3 * tps[1]) % 16 == 0


@pytest.mark.parametrize(
    ("kv_heads", "sample"), sampled(product(range(1, 17), (True, False)), lambda kv_heads, sample: sample)
)
def test_every_pair_of_shardings(kv_heads: int, sample: bool) -> None:
    """TP 1-8 x PP 1-4 on both sides: 1,024 pairs for each number of heads, of which `make test` moves 64."""
    torch.manual_seed(kv_heads)
    model = torch.randint(0, 256, (LAYERS, 2, TOKENS, kv_heads, HEAD_DIM), dtype=torch.uint8)
    shards = {(tp, pp): make_shards(LAYERS, kv_heads, tp, pp) for tp, pp in product(TP, PP)}
    for turn, (tps, pps) in enumerate(product(product(TP, TP), PP_PAIRS)):
        if in_sample(kv_heads, tps, pps) == sample:
            src, dst = (shards[sizes] for sizes in zip(tps, pps, strict=True))
            move(model, src, dst, group_count=1 + turn % 3)
