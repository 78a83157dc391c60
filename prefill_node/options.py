"""Constructor arguments of `SegmentSender`: options from the configuration, and objects of the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from disagg.core.config.read import Config
from disagg.core.ports import Clock
from disagg.core.timeline import Timeline
from disagg.core.types import Shard
from disagg.kv.page_tables import PageTables
from disagg.kv.transfer_pools import CopyPools
from disagg.node.rank import aligned
from staging.wire import Wire
from transport.base import Transport
from transport.control import messages as m
from transport.control.base import ControlChannel


@dataclass(frozen=True, slots=True)
class SenderOptions:
    """Sizes and limits of a sender."""

    tables: PageTables
    """Page tables of this rank's pools."""
    staging_bytes: int
    segment_bytes: int
    """Size of the largest segment until the wire has been measured."""
    groups: int
    """Largest number of layer groups in which a chunk is sent."""
    peer_memory: bool
    """Whether KV may be written directly into pools of decode ranks."""
    words: bool
    """Whether direct writes are reported by completion words, where the decode rank offers these."""
    checksum: bool
    wire: Wire
    """The wire that is assumed for a link until the link's wire has been measured."""
    quarantine_s: float
    """Time for which staging that was being sent to a lost peer is not reused."""
    lease_timeout_s: float

    @property
    def writes_disabled_reason(self) -> str:
        """Why direct writes are off; empty if enabled."""
        return "" if self.peer_memory else "transport.peer_memory is off on the prefill rank"

    @staticmethod
    def of(config: Config, tables: PageTables) -> SenderOptions:
        """Returns the options from `config`, whose automatic transfer sizes are already chosen for the device."""
        transfer = config.transfer
        return SenderOptions(
            tables=tables,
            staging_bytes=aligned(transfer.staging_bytes),
            segment_bytes=transfer.segment_limit_bytes,
            groups=transfer.layer_groups,
            peer_memory=config.transport.peer_memory,
            words=config.transport.completion_words and not transfer.checksum,
            checksum=bool(transfer.checksum),
            wire=Wire(transfer.segment_overhead_s or 0.0, transfer.wire_bytes_per_s),
            quarantine_s=2 * config.control.peer_timeout_s,
            lease_timeout_s=transfer.lease_timeout_s,
        )


@dataclass(frozen=True, slots=True, eq=False)
class SenderContext:
    """Objects of a rank that the rank's sender uses."""

    rank: int
    shard: Shard
    pool: CopyPools
    transport: Transport
    control: ControlChannel
    to_leader: Callable[[m.Message], None]
    lane: str
    """The rank's name in the timeline."""
    timeline: Timeline
    clock: Clock
