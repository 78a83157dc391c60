"""Computes the transfer of one prompt between two groups: routes, segments, bytes, messages. No model, no GPU.

Running ranks use the same functions (`staging.shards`, `staging.routes`, `staging.planner`), so the plan is exact.
"""

from __future__ import annotations

import msgspec

from disagg.core.errors import ConfigError
from disagg.core.types import DTYPE_BYTES, QUANTIZED_DTYPES, KVLayout, Segment, Shard, Span
from staging.planner import layer_groups, plan_segments
from staging.routes import Route, plan_routes
from staging.shards import layout_shards

STATES_REASON = "states of requests take at most 1/4 of the memory beside the weights"
"""Reason for an automatic `max_requests` below that of other models; see `disagg.model.recurrent.state`."""


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of the two groups and of the prompt. Raises `ConfigError` when a value is out of range."""

    layout: KVLayout
    """Layout of the KV in the decode groups and on the wire."""
    computed_dtype: str = ""
    """Element type of the prefill groups' KV if the sender quantizes; empty if KV is sent unchanged."""
    has_kv: bool = True
    """False for a model without attention: only its recurrent state is sent."""
    prefill_tp: int
    decode_tp: int
    tokens: int = 8192
    chunk_tokens: int = 256
    layer_groups: int = 4
    max_segment_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        layout = self.layout
        if layout.dtype not in DTYPE_BYTES:
            allowed = ", ".join(DTYPE_BYTES)
            raise ConfigError(f"dtype = {layout.dtype!r} is not allowed; it must be one of {allowed}")
        if self.computed_dtype and not self.quantizes:
            raise ConfigError(
                f"KV in {self.computed_dtype} cannot be sent as {layout.dtype}: KV is sent unchanged, or "
                "quantized from floats to one of " + ", ".join(QUANTIZED_DTYPES)
            )
        others = ("layout", "computed_dtype", "has_kv")
        values = {name: getattr(self, name) for name in self.__struct_fields__ if name not in others}
        names = ("layers", "kv_heads", "head_dim")
        sizes = [(name, getattr(one, name)) for one in layout.classes for name in names]
        for name, value in (*values.items(), *sizes):
            if value < 1:
                raise ConfigError(f"{name} = {value} is not allowed; it must be at least 1")

    @property
    def quantizes(self) -> bool:
        """Whether the sender quantizes KV."""
        return self.layout.quantized and self.computed_dtype in DTYPE_BYTES.keys() - QUANTIZED_DTYPES


class RouteTotal(msgspec.Struct, frozen=True):
    """One route, with its bytes and segments for the whole prompt."""

    route: Route
    nbytes: int
    segments: int


class TransferPlan(msgspec.Struct, frozen=True):
    """The computed transfer of one prompt from a prefill group to a decode group."""

    request: PlanRequest
    sources: tuple[Shard, ...]
    destinations: tuple[Shard, ...]
    routes: tuple[RouteTotal, ...]

    @property
    def chunks(self) -> int:
        """Number of prompt chunks, each of which is one prefill step."""
        return -(-self.request.tokens // self.request.chunk_tokens)

    @property
    def nbytes(self) -> int:
        """Bytes sent, both KV and recurrent state."""
        return sum(total.nbytes for total in self.routes)

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state sent: each decode rank receives the state of its heads, or the whole state."""
        return sum(total.nbytes for total in self.routes if self.request.layout.is_state(total.route.layers))

    @property
    def segments(self) -> int:
        """Number of segments, each sent as one data message."""
        return sum(total.segments for total in self.routes)

    @property
    def pairs(self) -> int:
        """Number of (source rank, destination rank) pairs that exchange data."""
        return len({(total.route.src_rank, total.route.dst_rank) for total in self.routes})

    @property
    def control_messages(self) -> int:
        """Control messages between prefill and decode ranks, in both directions, while the ring has room.

        Each pair of ranks exchanges one `LeaseRequest` and one `LeaseGrant` per chunk, and another such pair of
        messages for a recurrent state. The number does not depend on pages or heads. A full ring adds at most one
        `Watermark` per segment.
        """
        return 2 * sum(map(self._leases, (False, True)))

    def _leases(self, state: bool) -> int:
        """Returns the number of leases of all pairs of ranks, for KV chunks or (`state`) for recurrent states."""
        routes = [one.route for one in self.routes if self.request.layout.is_state(one.route.layers) == state]
        return len({(one.src_rank, one.dst_rank) for one in routes}) * (1 if state else self.chunks)


def compute_plan(request: PlanRequest) -> TransferPlan:
    """Returns the transfer plan of a request. Raises `ConfigError` for impossible sizes or too small segments."""
    layout = request.layout
    sources = layout_shards(layout, request.prefill_tp)
    destinations = layout_shards(layout, request.decode_tp)
    totals = [
        _state_total(request, route)
        if layout.is_state(route.layers)
        else _kv_total(request, route, sources[route.src_rank])
        for route in plan_routes(sources, destinations)
        if request.has_kv or layout.is_state(route.layers)
    ]
    return TransferPlan(request, sources, destinations, tuple(totals))


def _kv_total(request: PlanRequest, route: Route, source: Shard) -> RouteTotal:
    full, rest = divmod(request.tokens, request.chunk_tokens)
    whole = _segments(request, route, source, min(request.chunk_tokens, request.tokens))
    last = _segments(request, route, source, rest)
    return RouteTotal(
        route, nbytes=full * _bytes(whole) + _bytes(last), segments=full * len(whole) + len(last)
    )


def _state_total(request: PlanRequest, route: Route) -> RouteTotal:
    """Returns the total of a route of recurrent states, which are sent as one position after the last chunk."""
    position = request.layout.moved_tokens(route.layers, Span(0, request.tokens))
    limits = {route.dst_rank: request.max_segment_bytes}
    segments = plan_segments([route], request.layout, position, [route.layers], limits)
    return RouteTotal(route, _bytes(segments), len(segments))


def _segments(request: PlanRequest, route: Route, source: Shard, tokens: int) -> tuple[Segment, ...]:
    """Returns the segments of one chunk of `tokens` tokens on one route. `source`: the sending rank's shard."""
    part = source.parts[source.part_of(route.layers)]
    groups = layer_groups(part.layers, request.layer_groups)
    limits = {route.dst_rank: request.max_segment_bytes}
    return plan_segments([route], request.layout, Span(0, tokens), groups, limits)


def _bytes(segments: tuple[Segment, ...]) -> int:
    return sum(segment.nbytes for segment in segments)


def describe_bytes(nbytes: int) -> str:
    """Returns text like `1.5 MiB`, with binary units and three digits."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            return f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.4g} TiB"


def describe_span(what: str, span: Span) -> str:
    """Returns a label like `heads 0-3` or `head 5`."""
    return f"{what}s {span}" if len(span) != 1 else f"{what} {span}"


def plan_lines(plan: TransferPlan) -> list[str]:
    """Returns the plan as lines of text: the heads and layers of each rank, and the totals."""
    request, layout = plan.request, plan.request.layout
    shown = request.has_kv
    lines = [_side("prefill", plan.sources, layout, shown), _side("decode", plan.destinations, layout, shown)]
    lines += [
        f"{request.tokens} tokens in {plan.chunks} chunks, each in {request.layer_groups} layer groups: "
        f"{describe_bytes(plan.nbytes)} in {plan.segments} segments of at most "
        f"{describe_bytes(request.max_segment_bytes)}",
        f"{plan.control_messages} control messages between the ranks = 2 x {plan.pairs} pairs of ranks x "
        f"{_leased(plan)}",
    ]
    if layout.states:
        lines.append(
            f"a request transfers {describe_bytes(plan.nbytes)} = "
            f"{describe_bytes(plan.nbytes - plan.state_bytes)} of KV + {describe_bytes(plan.state_bytes)} of "
            f"recurrent state, {describe_bytes(layout.state_bytes_of(request.decode_tp))} to each decode rank"
        )
    if request.computed_dtype:
        computed = msgspec.structs.replace(layout, dtype=request.computed_dtype)
        share = layout.token_bytes / computed.token_bytes
        lines.append(
            f"KV is computed in {computed.dtype} and sent in {layout.dtype}: {share:.3f} of its bytes"
        )
    copies = sum(layout.token_bytes_of(shard) for shard in plan.destinations)
    if copies > layout.token_bytes:
        average = copies / layout.token_bytes
        lines.append(f"decode ranks hold each head {average:.3g} times on average; each copy is sent once")
    return lines


def _leased(plan: TransferPlan) -> str:
    """Returns what each pair of ranks leases: text like `32 chunks`, `(32 chunks + 1 state)` or `1 state`."""
    chunks = f"{plan.chunks} chunks" if plan.request.has_kv else ""
    state = "1 state" if plan.request.layout.states else ""
    return f"({chunks} + {state})" if chunks and state else chunks or state


def _state_words(shard: Shard, layout: KVLayout, ranks: int) -> str:
    """Returns text like `recurrent state of 14 KiB: heads 0-5 of 12` for a rank; empty without recurrent layers."""
    if not layout.states:
        return ""
    text = f"recurrent state of {describe_bytes(layout.state_bytes_of(ranks))}"
    for part, one in zip(shard.states, layout.states, strict=True):
        if one.heads == one.layer_heads:
            return f"{text}: {describe_span('head', part.heads)} of {one.heads}"
    return text


def _side(role: str, shards: tuple[Shard, ...], layout: KVLayout, has_kv: bool) -> str:
    """Returns a title line, and for each rank and class of layers a line like `r1 [..##] heads 2-3, layers 0-31`."""
    lines = [f"{role}, {len(shards)} rank{'s' * (len(shards) > 1)}"]
    if not has_kv:
        states = [f"  r{shard.rank} {_state_words(shard, layout, len(shards))}" for shard in shards]
        return "\n".join([f"{lines[0]}: no attention, so no KV", *states])
    for shard in shards:
        for part, one in zip(shard.parts, layout.classes, strict=True):
            bar = "".join("#" if head in part.heads else "." for head in range(one.kv_heads))
            owns = f"{describe_span('head', part.heads)}, {describe_span('layer', part.layers)}"
            size = f" of {one.head_dim}{'' if one.has_v else ', keys alone'}" if layout.more else ""
            lines.append(f"  r{shard.rank} [{bar}] {owns}{size}")
        if layout.states:
            lines.append(f"  r{shard.rank} {_state_words(shard, layout, len(shards))}")
    return "\n".join(lines)
