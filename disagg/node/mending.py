"""Repair of links between live ranks: both sides fence the old data connection and link again.

There are two cases. If the control channel loses a live peer, both sides fence at the loss, and link again when the
control channel reconnects. If only the data connection breaks, one *round* of messages repairs it:

    rank A, which detects the loss      fences rank B, sends `LinkBroken`
    rank B                              fences rank A, sends `LinkBroken(answer)`, links again, sends `Linked`
    rank A, on the answer               links again, sends `Linked`

Neither rank connects before both have fenced, so no fence can end a new connection. If both ranks send `LinkBroken`
at once, each message also serves as the answer to the other. A rank sends active messages to a peer only after the
`Linked` of the peer's latest link (`transport.active_messages`). A rank therefore receives no active message before
it has linked.

If the control channel loses a peer and reconnects within a round, one side can link before the other side fences.
The linked side then receives a second `Linked` and starts another round. A rank that cannot connect also starts
another round, after a pause.
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
"""First and longest pause between two rounds with one peer; the pause doubles while connections keep breaking."""


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
        """`fence` ends all work with a peer and disconnects; `send` sends over the control channel.

        `link` links this rank with a group again, and returns False on failure. `linked` handles a peer's `Linked`;
        see `Agent.on_linked`.
        """
        self._silences, self._lane, self._clock = silences, lane, clock
        self._fence, self._send, self._link, self._linked = fence, send, link, linked
        self._requested: set[str] = set()
        """Peers that this rank has fenced and that have not answered its `LinkBroken` yet."""
        self._pauses: dict[str, _Pause] = {}
        self._unlinked: set[str] = set()
        """Peers whose group this rank failed to link again. A new round with the peer starts after the pause."""
        self.rounds = 0
        """Number of repair rounds that this rank started."""

    def on_connection_lost(self, peer: str) -> None:
        """Starts a round, unless a round is running or the pause after the last round is not over."""
        if self._silences.is_linked(peer) and not self._pausing(peer):
            self._begin(peer)

    def look(self) -> None:
        """Starts the rounds that are due after failed links. The transfer thread calls this method regularly."""
        for peer in [one for one in self._unlinked if not self._pausing(one)]:
            self.on_connection_lost(peer)
            self._unlinked.discard(peer)

    def on_fenced(self, peer: str) -> None:
        """Starts a round with a peer that this rank has fenced outside of a round."""
        self._begin(peer)

    def on_link_broken(self, peer: str, message: m.LinkBroken) -> None:
        """Handles `LinkBroken`: the peer has fenced this rank.

        Fences the peer unless already fenced, then links again.
        """
        if peer in self._requested:
            self._requested.discard(peer)
            self._link_again(peer)
        elif not message.answer:  # else the answer is outdated: the control channel has lost the peer since
            connected = self._silences.is_linked(peer) and self._silences.mark_silent(peer)
            self._drop(peer)
            self._send(peer, m.LinkBroken(answer=True))
            if connected:  # a silent peer is linked again when the control channel reconnects
                self._link_again(peer)

    def on_linked(self, peer: str, message: m.Linked) -> None:
        """Handles `Linked`: the peer has connected to this rank.

        Ignores the message while an answer of the peer is outstanding, because the peer sent it before fencing this
        rank. Starts a round if the peer has fenced this rank since the peer's previous `Linked`.
        """
        if peer not in self._requested and not self._linked(peer, message) and self._silences.is_linked(peer):
            self._begin(peer)

    def on_silent(self, peer: str) -> None:
        """Fences a peer of a linked group that the control channel has lost; ends a running round with the peer."""
        self._requested.discard(peer)
        self._unlinked.discard(peer)
        if self._silences.mark_silent(peer):
            log.warning("peer_lost", peer=peer, lane=self._lane)
        self._fence(peer)

    def on_met(self, peer: str) -> None:
        """Links again with a silent peer whose control channel has reconnected."""
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
        """Sets the pause before the next round with the peer; returns its length."""
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
