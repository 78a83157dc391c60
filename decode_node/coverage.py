"""Records which part of a ticket's KV was announced, and ensures that each cell is written exactly once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import numpy as np

from disagg.core.errors import ProtocolError
from disagg.core.types import KVLayout, Segment, Span
from staging.routes import Route


class Coverage:
    """Record of the announced segments of one ticket.

    The planner cuts the segments of one route and one layer without gap or overlap. One position for each
    (route, layer) therefore describes the part that was announced.
    """

    def __init__(
        self, routes: tuple[Route, ...], tokens: Span, layout: KVLayout, starts: tuple[int, ...] = ()
    ) -> None:
        """`tokens`, `starts`: those of the ticket. A recurrent state, if `layout` has one, follows the positions."""
        self._tokens, self._layout = tokens, layout
        self._moved = {route: layout.moved_tokens(route.layers, tokens, starts) for route in routes}
        self._next = {route: [moved.start] * len(route.layers) for route, moved in self._moved.items()}
        self._from: Counter[int] = Counter()
        for route, moved in self._moved.items():
            self._from[route.src_rank] += self._bytes(route.layers, route.heads, moved)
        self.total_bytes = self._from.total()

    def bytes_from(self, src_rank: int) -> int:
        """Returns the bytes that one source rank sends in total."""
        return self._from[src_rank]

    def bytes_by_layer(self) -> dict[int, int]:
        """Returns the bytes of each layer that are sent in total."""
        found: Counter[int] = Counter()
        for route, moved in self._moved.items():
            for layer in route.layers:
                found[layer] += self._bytes(Span(layer, layer + 1), route.heads, moved)
        return dict(found)

    def add(self, segment: Segment) -> None:
        """Records a segment. Raises `ProtocolError`, changing nothing, unless it is the next segment of its route."""
        route = self._route_of(segment)
        nbytes = self._bytes(segment.layers, segment.heads, segment.tokens)
        if segment.nbytes != nbytes:
            raise ProtocolError(f"{segment} has {segment.nbytes} bytes instead of {nbytes}")
        rows = segment.layers.shift(-route.layers.start)
        ahead = self._next[route]
        if not self._moved[route].covers(segment.tokens) or any(
            ahead[row] != segment.tokens.start for row in rows
        ):
            raise ProtocolError(
                f"{segment} does not follow its route's previous segment, or exceeds the ticket"
            )
        for row in rows:
            ahead[row] = segment.tokens.stop

    def is_early(self, segment: Segment) -> bool:
        """Returns whether an earlier segment of the same route is missing. Raises `ProtocolError` for a segment on no
        route."""
        route = self._route_of(segment)
        ahead = self._next[route]
        return any(ahead[row] < segment.tokens.start for row in segment.layers.shift(-route.layers.start))

    def whole_tokens(self, segments: Iterable[Segment]) -> int:
        """Returns the number of leading tokens of the ticket whose KV `segments` cover in all layers and heads.

        `segments` must not overlap.
        """
        count, first = len(self._tokens), self._tokens.start
        changes = np.zeros(count + 1, np.int64)
        for route, moved in self._moved.items():
            if not self._layout.is_state(route.layers):
                token_bytes = self._bytes(route.layers, route.heads, Span(0, 1))
                changes[moved.start - first] += token_bytes
                changes[moved.stop - first] -= token_bytes
        for segment in segments:
            if not self._layout.is_state(segment.layers):
                token_bytes = segment.nbytes // len(segment.tokens)
                changes[segment.tokens.start - first] -= token_bytes
                changes[segment.tokens.stop - first] += token_bytes
        missing = np.flatnonzero(np.cumsum(changes[:count]))
        return int(missing[0]) if len(missing) else count

    def _route_of(self, segment: Segment) -> Route:
        for route in self._moved:
            same = route.src_rank == segment.src_rank and route.heads == segment.heads
            if same and segment.layers and segment.tokens and route.layers.covers(segment.layers):
                return route
        raise ProtocolError(f"{segment} is on no route to this rank")

    def _bytes(self, layers: Span, heads: Span, tokens: Span) -> int:
        return len(layers) * len(heads) * len(tokens) * self._layout.class_of(layers).cell_bytes
