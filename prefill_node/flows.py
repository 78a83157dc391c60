"""What a sender counts: bytes and busy time of each route, transfer that compute did not hide, and its statistics."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from disagg.core.status import Path, RouteStatus
from disagg.node.device import Marker, is_done

if TYPE_CHECKING:
    from prefill_node.outgoing import Outgoing


@dataclass(slots=True)
class BusyTime:
    """How long at least one of several things that overlap was under way."""

    _under_way: int = 0
    _since_s: float = 0.0
    _ended_s: float = 0.0
    """Summed up to the last time that none was."""

    def begin(self, now_s: float) -> None:
        """One starts."""
        self._since_s = now_s if self._under_way == 0 else self._since_s
        self._under_way += 1

    def end(self, now_s: float) -> None:
        """One has ended."""
        self._under_way -= 1
        self._ended_s += now_s - self._since_s if self._under_way == 0 else 0.0

    def total_s(self, now_s: float) -> float:
        """Up to now, with what is still under way. Never falls."""
        return self._ended_s + (now_s - self._since_s if self._under_way else 0.0)


@dataclass(slots=True, eq=False)
class Flow:
    """What goes to one decode rank by one path."""

    nbytes: int = 0
    segments: int = 0
    busy: BusyTime = field(default_factory=BusyTime)


class Flows:
    """A rank's flows, by decode rank and path. Segments keep theirs: one that is forgotten may still be counted."""

    def __init__(self) -> None:
        self._targets: dict[str, str] = {}
        self._flows: dict[tuple[str, Path], Flow] = {}

    def link(self, peer: str, target: str) -> None:
        """From now on the peer is shown, as `target`."""
        self._targets[peer] = target

    def of(self, peer: str, path: Path) -> Flow:
        """Where segments of that path to the peer are counted."""
        return self._flows.setdefault((peer, path), Flow())

    def forget(self, peer: str) -> None:
        """The peer is gone, and what it was sent."""
        self._targets.pop(peer, None)
        for key in [key for key in self._flows if key[0] == peer]:
            del self._flows[key]

    def statuses(self, now_s: float, path_to: Callable[[str], Path]) -> tuple[RouteStatus, ...]:
        """Of each peer: the path that its next segment takes, and the other one if it was ever taken."""
        for peer in self._targets:
            self.of(peer, path_to(peer))
        return tuple(
            RouteStatus(self._targets[peer], path, flow.nbytes, flow.segments, flow.busy.total_s(now_s))
            for (peer, path), flow in sorted(self._flows.items(), key=lambda item: item[0])
            if peer in self._targets and (flow.segments or path == path_to(peer))
        )


class Exposed:
    """Sums, over prompts, the time from the moment their last KV was written to the end of their last segment."""

    def __init__(self) -> None:
        self._pending: deque[tuple[Marker, Outgoing]] = deque()
        self.total_s = 0.0

    def __bool__(self) -> bool:
        """Whether the device still computes the end of a prompt that it was given."""
        return bool(self._pending)

    def computed(self, outgoings: Iterable[Outgoing], marker: Marker, now_s: float) -> None:
        """The last KV of those that miss none is written once `marker`, behind all earlier ones, is done."""
        self._pending.extend((marker, outgoing) for outgoing in outgoings if outgoing.all_computing)
        self.look(now_s)

    def look(self, now_s: float) -> None:
        """Notes whose KV is written by now."""
        while self._pending and is_done(self._pending[0][0]):
            self._pending.popleft()[1].computed_s = now_s

    def finished(self, outgoing: Outgoing, now_s: float) -> None:
        """All of its segments have left. Again: nothing happens."""
        self.look(now_s)
        if outgoing.computed_s is not None:  # else it had nothing to send
            self.total_s += now_s - outgoing.computed_s
            outgoing.computed_s = None


@dataclass(frozen=True, slots=True)
class SenderStatistics:
    """The sender as it stands, and counts since it was made."""

    tickets: int
    """Open now; finished ones are kept until they are closed."""
    under_way: int
    """Segments that hold staging now."""
    staging_in_use_bytes: int
    """Of segments under way."""
    quarantined_bytes: int
    """Staging that a lost peer may still read for a while."""
    segments_sent: int
    bytes_sent: int
    segments_sent_again: int
    """Of those sent, the second sendings of damaged segments."""
    segments_written: int
    """Of those sent, the ones that were written straight into the destination's pool."""
    open_pools: int
    """Pools of decode ranks that are written to."""
    refused_pools: int
    """Offers that this rank could not take."""
    stale: int
    """Messages for tickets or segments that are not, or no longer, known; dropped."""
