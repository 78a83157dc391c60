"""Handling of peers that die, become silent or return: ends work with them, and links their groups again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Protocol

import structlog

from disagg.core.ports import Clock
from disagg.core.types import GroupInfo
from disagg.node.agent import Agent
from disagg.node.leader import Leader
from disagg.node.mending import Mending
from disagg.node.silence import Silences
from transport.control.base import ControlChannel

log = structlog.get_logger(__name__)


class Post(Protocol):
    """Queues work for the transfer thread; see `TransferLoop.post`."""

    def __call__(self, work: Callable[[], None]) -> None: ...


class RankPeers:
    """Handles the loss and the return of peers. Thread-safe."""

    def __init__(
        self,
        lane: str,
        control: ControlChannel,
        agent: Agent,
        leader: Leader | None,
        *,
        post: Post,
        link: Callable[[GroupInfo], bool],
        unled: Callable[[str], None],
        clock: Clock,
    ) -> None:
        """`link` connects to a group again, on the transfer thread, and returns False on failure.

        `unled` handles the loss of a peer on a rank that has no leader (all ranks except rank 0).
        """
        self._lane, self._control, self._agent, self._leader = lane, control, agent, leader
        self._post, self._unled = post, unled
        self.silences = Silences()
        """Linked groups, and their silent peers."""
        self.mending = Mending(
            self.silences,
            lane,
            fence=agent.on_peer_lost,
            send=control.send,
            link=link,
            linked=agent.on_linked,
            clock=clock,
        )
        """Repairs links; used on the transfer thread."""

    def lost(self, peer: str) -> None:
        """Ends all work with a dead peer. Idempotent."""
        self.silences.dead(peer)
        self._control.forget(peer)
        self._lose(peer)
        self._post(partial(self.mending.dead, peer))

    def silent(self, peer: str) -> None:
        """Ends all work with a silent peer, or with a peer that disconnected from this rank, as if it were dead.

        A silent peer of a linked group may be alive but cut off, so the rank keeps watching the peer; see `met`.
        """
        if not self.silences.is_linked(peer):
            self._lose(peer)
            self._post(partial(self._repeat_if_linked, peer))
            return
        self._post(partial(self.mending.on_silent, peer))
        if self._leader is not None:
            self._leader.on_peer_lost(peer)
        self._control.watch(peer)

    def suspected(self, peer: str, silent: bool) -> None:
        """Notifies the leader that a peer is silent, or responds again. Ends no request and no transfer."""
        if self._leader is not None:
            self._leader.on_peer_suspected(peer, silent)

    def met(self, peer: str) -> None:
        """Links again with a peer whose control channel has reconnected.

        Both sides have fenced each other by then, because a control channel that one side loses ends on both sides.
        """
        self._post(partial(self.mending.on_met, peer))

    def _repeat_if_linked(self, peer: str) -> None:
        """Handles a loss again if `RankNode.link` ran concurrently and connected the peer before the work with it was
        ended.

        The control channel may have reconnected before this call; a round of repair links again in either case.
        """
        if self.silences.is_linked(peer):
            self.mending.on_fenced(peer)
            if self._leader is not None:
                self._control.call_soon(partial(self._leader.on_peer_lost, peer))

    def _lose(self, peer: str) -> None:
        log.warning("peer_lost", peer=peer, lane=self._lane)
        self._post(partial(self._agent.on_peer_lost, peer))
        if self._leader is not None:
            self._leader.on_peer_lost(peer)
        else:
            self._unled(peer)
