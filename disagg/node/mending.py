"""Repair of links between living ranks: both sides fence the old data connection and link again.

The control channel can lose a peer that lives: then both sides fence at the loss, and link when the channel meets the
peer again. Or the data connection breaks while the control channel works. Then one round mends it:

    the rank that detects the loss      fences the peer, sends `LinkBroken`
    the other rank                      fences the first, sends `LinkBroken(answer)`, links again, sends `Linked`
    the first rank, on the answer       links again, sends `Linked`

So neither rank connects before both have fenced, and no fence ends a new connection. Two crossing requests answer
each other. A rank sends active messages to a peer only after the `Linked` of the peer's latest link
(`transport.active_messages`), so none reaches a rank that has not linked yet.

A control channel that loses and meets a peer within a round can leave one side linked before the other's fence. That
side receives a second `Linked`, and starts another round. So does a rank that cannot connect, after a pause.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import structlog

from disagg.core.ports import Clock
from disagg.core.types import GroupInfo
from disagg.node.silence import Silences
from transport.control import messages as m

log = structlog.get_logger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Pause between two rounds with one peer; doubles while connections keep breaking."""


@dataclass(frozen=True, slots=True)
class _Pause:
    length_s: float
    until_s: float


class Mending:
    """Repairs the data connections of one rank. Owned by the transfer thread."""

    def __init__(
        self,
        silences: Silences,
        lane: str,
        *,
        fence: Callable[[str], None],
        send: Callable[[str, m.Message], None],
        link: Callable[[GroupInfo], bool],
        linked: Callable[[str, m.Linked], bool],
        clock: Clock,
    ) -> None:
        """`fence` ends all work with a peer and disconnects; `send` is the control channel's.

        `link` links again; it returns False when that failed.
        `linked` opens the way to a peer that has linked; it returns False when the peer has fenced this rank since.
        """
        self._silences, self._lane, self._clock = silences, lane, clock
        self._fence, self._send, self._link, self._linked = fence, send, link, linked
        self._requested: set[str] = set()
        """Peers that are fenced here and have not responded."""
        self._pauses: dict[str, _Pause] = {}
        self._unlinked: set[str] = set()
        """Peers whose group this rank could not link again: a round follows the pause."""
        self.rounds = 0
        """Rounds that this rank started."""

    def on_connection_lost(self, peer: str) -> None:
        """Starts a round, unless one is running or the pause after the last one is not over."""
        if self._silences.is_linked(peer) and not self._pausing(peer):
            self._begin(peer)

    def look(self) -> None:
        """Starts the rounds that follow a failed link, when due. Call it regularly."""
        for peer in [one for one in self._unlinked if not self._pausing(one)]:
            self.on_connection_lost(peer)
            self._unlinked.discard(peer)

    def on_fenced(self, peer: str) -> None:
        """Starts a round with a peer of a linked group that this rank has fenced outside of a round."""
        self._begin(peer)

    def on_link_broken(self, peer: str, message: m.LinkBroken) -> None:
        """Fences the peer, which has fenced this rank, unless that is done; then links again."""
        if peer in self._requested:
            self._requested.discard(peer)
            self._link_again(peer)
        elif not message.answer:  # else the control channel lost and met the peer since the request
            connected = self._silences.is_linked(peer) and self._silences.mark_silent(peer)
            self._drop(peer)
            self._send(peer, m.LinkBroken(answer=True))
            if connected:  # a silent peer is linked when the control channel meets it
                self._link_again(peer)

    def on_linked(self, peer: str, message: m.Linked) -> None:
        """Opens the way to a peer that has linked. In a round the message is older than the peer's fence.

        Starts a round when the peer has fenced this rank after this rank linked it.
        """
        if peer not in self._requested and not self._linked(peer, message) and self._silences.is_linked(peer):
            self._begin(peer)

    def on_silent(self, peer: str) -> None:
        """Fences a peer of a linked group that the control channel lost. Ends a round with it."""
        self._requested.discard(peer)
        self._unlinked.discard(peer)
        if self._silences.mark_silent(peer):
            log.warning("peer_lost", peer=peer, lane=self._lane)
        self._fence(peer)

    def on_met(self, peer: str) -> None:
        """Links again with a silent peer that is back."""
        self._link_again(peer)

    def dead(self, peer: str) -> None:
        """Removes a dead peer."""
        self._requested.discard(peer)
        self._unlinked.discard(peer)
        self._pauses.pop(peer, None)

    def _begin(self, peer: str) -> None:
        if not self._silences.mark_silent(peer):
            return  # a round is running, or the control channel lost the peer and links again later
        self.rounds += 1
        self._drop(peer)
        self._requested.add(peer)
        self._send(peer, m.LinkBroken())

    def _pausing(self, peer: str) -> bool:
        pause = self._pauses.get(peer)
        return pause is not None and self._clock() < pause.until_s

    def _drop(self, peer: str) -> None:
        length_s = self._pause(peer)
        log.warning("data_connection_broken", peer=peer, lane=self._lane, next_try_after_s=length_s)
        self._fence(peer)

    def _pause(self, peer: str) -> float:
        """Delays the next round with the peer; returns the delay."""
        now_s, last = self._clock(), self._pauses.get(peer)
        soon = last is not None and now_s < last.until_s + LONGEST_PAUSE_S
        length_s = min(2 * last.length_s, LONGEST_PAUSE_S) if last is not None and soon else FIRST_PAUSE_S
        self._pauses[peer] = _Pause(length_s, now_s + length_s)
        return length_s

    def _link_again(self, peer: str) -> None:
        self._unlinked.discard(peer)
        linked = [self._link(group) for group in self._silences.mark_met(peer)]
        if not all(linked):
            self._unlinked.add(peer)
            self._pause(peer)
