"""Which layers and KV heads each rank of a group owns."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Shard, Span


def split(span: Span, parts: int) -> tuple[Span, ...]:
    """Cuts `span` into `parts` contiguous spans whose lengths differ by at most one."""
    bounds = [span.start + i * len(span) // parts for i in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(bounds))


def head_span(kv_heads: int, tp: int, tp_rank: int) -> Span:
    """KV heads that rank `tp_rank` of `tp` owns: all that its even share of the query heads touches.

    One formula for a split (heads >= ranks), replicas (ranks > heads) and what is neither: with 4 heads on 3
    ranks the shares [0, 4/3), [4/3, 8/3), [8/3, 4) touch heads 0-1, 1-2 and 2-3.
    """
    return Span(tp_rank * kv_heads // tp, -(-(tp_rank + 1) * kv_heads // tp))


def make_shards(layers: int, kv_heads: int, tp: int, pp: int = 1) -> tuple[Shard, ...]:
    """The shards of a group of `tp * pp` ranks; rank = pp_rank * tp + tp_rank.

    Layers are split over `pp` stages as evenly as they go, KV heads over `tp` ranks as `head_span` says.
    Raises ConfigError when a size is below 1 or there are fewer layers than stages.
    """
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}")
    if pp > layers:
        raise ConfigError(f"pp={pp} stages need at least as many layers; the model has {layers}: lower pp")
    return tuple(
        Shard(rank=pp_rank * tp + tp_rank, layers=stage, heads=head_span(kv_heads, tp, tp_rank))
        for pp_rank, stage in enumerate(split(Span(0, layers), pp))
        for tp_rank in range(tp)
    )


def layout_shards(layout: KVLayout, tp: int, pp: int = 1) -> tuple[Shard, ...]:
    """As `make_shards`, of every class of layers. Raises ConfigError for stages of a layout of several classes."""
    if not layout.more:
        return make_shards(layout.layers, layout.kv_heads, tp, pp)
    if tp < 1 or pp != 1:
        raise ConfigError(
            f"a model whose layers differ in their heads has tp >= 1 and pp = 1; got {tp} and {pp}"
        )
    return tuple(
        Shard.of_classes(rank, layout, partial(head_span, tp=tp, tp_rank=rank)) for rank in range(tp)
    )
