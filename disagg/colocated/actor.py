"""The colocated rank as a Ray actor; `ColocatedRank` holds all logic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from disagg.node.host import RankHost
from disagg.node.ownership import NO_COUNTS, GroupCounts, Owner
from disagg.node.rank_records import ClaimReply

if TYPE_CHECKING:  # torch and transformers, which the cluster that places the rank need not load
    from disagg.colocated.rank import ColocatedRank


# No restarts, and a concurrency group for `park`: `prefill_node.actor` gives the reasons.
@ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"watch": 2})
class ColocatedActor(RankHost):
    """Ray actor that hosts a `ColocatedRank`; `disagg.node.host` describes its threads and its owner."""

    role = "colocated"

    @staticmethod
    def rank_class() -> type[ColocatedRank]:
        """Returns `ColocatedRank`; see `RankHost.rank_class`."""
        from disagg.colocated.rank import ColocatedRank

        return ColocatedRank

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def pulse(self, token: str = "", counts: GroupCounts = NO_COUNTS) -> bool:
        """Records a pulse of the owner; see `RankHost.pulse`."""
        return super().pulse(token, counts)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def claim(self, claimant: Owner) -> ClaimReply:
        """Makes `claimant` the owner if the current owner is dead; see `RankHost.claim`."""
        return super().claim(claimant)

    @ray.method(concurrency_group="watch")  # type: ignore[untyped-decorator]
    def park(self, token: str = "") -> str:
        """Blocks until the rank ends or has a new owner; returns the reason. See `RankHost.park`."""
        return super().park(token)
