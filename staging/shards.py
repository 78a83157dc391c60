"""The layers and KV heads that each rank of a group owns."""

from __future__ import annotations

from itertools import pairwise

from disagg.core.errors import ConfigError
from disagg.core.types import KVLayout, Shard, Span, head_span


def split(span: Span, parts: int) -> tuple[Span, ...]:
    """Cuts `span` into `parts` contiguous spans whose lengths differ by at most one."""
    if parts == 1:  # the frequent case, called several times per chunk
        return (span,)
    bounds = [span.start + i * len(span) // parts for i in range(parts + 1)]
    return tuple(Span(start, stop) for start, stop in pairwise(bounds))


def make_shards(layers: int, kv_heads: int, tp: int, pp: int = 1) -> tuple[Shard, ...]:
    """Returns the shards of a group of `tp * pp` ranks; rank = pp_rank * tp + tp_rank.

    The layers are split evenly over `pp` stages, the KV heads over `tp` ranks by `head_span`. Raises
    ConfigError when a size is below 1 or there are fewer layers than stages.
    """
    for name, value in (("layers", layers), ("kv_heads", kv_heads), ("tp", tp), ("pp", pp)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1; got {value}")
    if pp > layers:
        raise ConfigError(f"pp={pp} stages need at least as many layers; the model has {layers}: lower pp")
    return tuple(
        Shard(rank=pp_rank * tp + tp_rank, layers=stage, heads=head_span(tp_rank, tp, kv_heads))
        for pp_rank, stage in enumerate(split(Span(0, layers), pp))
        for tp_rank in range(tp)
    )


def layout_shards(layout: KVLayout, tp: int, pp: int = 1) -> tuple[Shard, ...]:
    """Returns the shards of a group of `tp * pp` ranks for a model's KV layout, with the heads of each layer class.

    Each rank holds its heads of the recurrent states (`StateClass.span`). Raises ConfigError for pp > 1 with several
    layer classes or with recurrent states.
    """
    if not (layout.more or layout.states):
        return make_shards(layout.layers, layout.kv_heads, tp, pp)
    if tp < 1 or pp != 1:
        kind = "whose layers differ in their heads" if layout.more else "with recurrent layers"
        raise ConfigError(f"a model {kind} needs tp >= 1 and pp = 1; got tp = {tp} and pp = {pp}")
    return tuple(Shard.of_classes(rank, tp, layout) for rank in range(tp))
