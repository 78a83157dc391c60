"""The prefill rank as a Ray actor; `PrefillRank` holds all logic."""

from __future__ import annotations

from typing import TYPE_CHECKING

import ray

from disagg.core.types import GroupInfo
from disagg.node.host import RankHost
from disagg.node.ownership import NO_COUNTS, GroupCounts, Owner
from disagg.node.rank_records import ClaimReply

if TYPE_CHECKING:  # torch and transformers, which the cluster that places the rank need not load
    from prefill_node.rank import PrefillRank
    from prefill_node.wire_summary import Calibration


# No restarts: a restarted rank cannot rejoin its group, and with restarts Ray reports a death only when the
# replacement is up. `park` blocks a thread of its own concurrency group, so the other methods can run.
@ray.remote(max_restarts=0, max_concurrency=1, concurrency_groups={"watch": 2})
class PrefillActor(RankHost):
    """Ray actor that hosts a `PrefillRank`; `disagg.node.host` describes its threads and its owner."""

    role = "prefill"

    @staticmethod
    def rank_class() -> type[PrefillRank]:
        """Returns `PrefillRank`; see `RankHost.rank_class`."""
        from prefill_node.rank import PrefillRank

        return PrefillRank

    def calibrate(self, other: GroupInfo) -> Calibration | None:
        """Measures the wire to a linked decode group; see `PrefillRank.calibrate`."""
        rank = self._running()
        assert isinstance(rank, self.rank_class()), "the host makes ranks of `rank_class`"
        return rank.calibrate(other)

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
