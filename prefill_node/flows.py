"""Counters of a sender: traffic by decode rank and path, and statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from disagg.core.status import Path, RouteStatus


@dataclass(slots=True)
class BusyTime:
    """Time during which at least one of several overlapping operations was under way."""

    _under_way: int = 0
    _since_s: float = 0.0
    _ended_s: float = 0.0
    """Total until the latest moment at which no operation was under way."""

    def begin(self, now_s: float) -> None:
        """Counts the start of an operation."""
        self._since_s = now_s if self._under_way == 0 else self._since_s
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """Counts the end of an operation."""
        self._under_way -= 1
        self._ended_s += now_s - self._since_s if self._under_way == 0 else 0.0

    def total_s(self, now_s: float) -> float:
        """Returns the total up to now, operations under way included. Never decreases."""
        return self._ended_s + (now_s - self._since_s if self._under_way else 0.0)


@dataclass(slots=True, eq=False)
class Flow:
    """Traffic to one decode rank by one path: direct writes, or staging and ring."""

    nbytes: int = 0
    segments: int = 0
    busy: BusyTime = field(default_factory=BusyTime)


class Flows:
    """Flows of a rank, by decode rank and path. A segment under way updates its flow even after `forget`."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._flows: dict[tuple[str, Path], Flow] = {}

    def link(self, peer: str, target: str) -> None:
        """Makes `statuses` report the traffic to a peer, under the name `target`."""
        self._targets[peer] = target

    def of(self, peer: str, path: Path) -> Flow:
        """Returns the traffic counters of a peer and path; creates them at the first call."""
        return self._flows.setdefault((peer, path), Flow())

    def forget(self, peer: str) -> None:
        """Drops the flows of a lost peer."""
        self._targets.pop(peer, None)
        for key in [key for key in self._flows if key[0] == peer]:
            del self._flows[key]

    def statuses(self, now_s: float, path_to: Callable[[str], Path]) -> tuple[RouteStatus, ...]:
        """Returns the traffic of each linked peer by path.

        A path without traffic is included only if the peer's next segment takes it. `path_to` returns that path.
        """
        for peer in self._targets:
            self.of(peer, path_to(peer))
        return tuple(
            RouteStatus(self._targets[peer], path, flow.nbytes, flow.segments, flow.busy.total_s(now_s))
            for (peer, path), flow in sorted(self._flows.items(), key=lambda item: item[0])
            if peer in self._targets and (flow.segments or path == path_to(peer))
        )


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """Current state of a sender, and counts since the sender started."""

    tickets: int
    """Open tickets; a sent ticket stays open until it is closed."""
    under_way: int
    """Segments that hold staging."""
    staging_in_use_bytes: int
    """Staging of segments under way."""
    quarantined_bytes: int
    """Staging that stays reserved for a while, because a lost peer may still read it."""
    segments_sent: int
    bytes_sent: int
    segments_sent_again: int
    """Segments that were sent a second time, because they had arrived damaged; part of `segments_sent`."""
    segments_written: int
    """Direct writes into the destination's pool; part of `segments_sent`."""
    segments_reported: int
    """Direct writes that were reported by a completion word, without a notification; part of `segments_written`."""
    open_pools: int
    """Pools of decode ranks that are mapped for direct writes."""
    refused_pools: int
    """Pool offers that this rank could not map."""
    stale: int
    """Dropped messages for unknown or closed tickets and segments."""
