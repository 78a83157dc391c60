"""Interface of a rank's transfer agent, which sends KV in a prefill rank and receives KV in a decode rank."""

from __future__ import annotations

from typing import Protocol

from disagg.core.status import RankStatus
from disagg.node.links import Link
from disagg.node.transfer_loop import TransferAgent
from transport.control import messages as m


class Agent(TransferAgent, Protocol):
    """Interface of a transfer agent to its rank. All methods run on the transfer thread."""

    def adopt_thread(self) -> None:
        """Makes the calling thread the transfer thread."""

    def link(self, link: Link) -> None:
        """Connects to the ranks of the linked group; sends `Linked` to each rank that was not connected before."""

    def on_linked(self, peer: str, message: m.Linked) -> bool:
        """Handles the `Linked` of a peer, which has connected to this rank.

        Returns False if the peer has fenced this rank since the peer's previous `Linked`.
        """

    def on_peer_lost(self, peer: str) -> None:
        """Fences the peer and ends all work with it."""

    def statistics(self) -> object:
        """Returns the current counts."""

    def status(self) -> RankStatus:
        """Returns the rank's status for metrics. The status counts only the agent's own faults. Cheap to call."""

    def check(self) -> None:
        """Raises `InvariantError` if the agent is inconsistent."""
