"""The colocated rank as a Ray actor; `ColocatedRank` holds all logic."""

from __future__ import annotations

import ray

from disagg.core.collection import collection_paused

with collection_paused():  # a rank's process imports torch and transformers here
    from disagg.colocated.rank import ColocatedRank
    from disagg.node.host import ClaimReply, RankHost
    from disagg.node.ownership import NO_COUNTS, GroupCounts, Owner


# No restarts, and a concurrency group for `park`: `prefill_node.actor` gives the reasons.
@ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"watch": 2})
class ColocatedActor(RankHost):
    """Ray actor that hosts a `ColocatedRank`; `disagg.node.host` describes its threads and its owner."""

    node_class = ColocatedRank

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
