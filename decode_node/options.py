"""Constructor arguments of `SegmentReceiver` and its parts: options from the configuration, objects of the rank."""

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
from transport.base import Transport
from transport.control import messages as m


@dataclass(frozen=True, slots=True)
class ReceiverOptions:
    """Settings of one receiver."""

    tables: PageTables
    """Page tables of this rank's pools."""
    ring_bytes: int
    fence_rows: int
    """Number of fence words, which control direct writes into the pool; with 0 the pool is offered to no peer."""
    checksum: bool
    """Whether segments carry checksums."""
    quarantine_s: float
    """Time after which the last launch of a fenced writer has ended, even if the writer was fenced by mistake."""
    lease_timeout_s: float
    watermark_interval_s: float
    """Seconds between two repetitions of a watermark."""
    words: bool = False
    """Whether prefill ranks report direct writes by completion words (`transport.completion_words`)."""

    @staticmethod
    def of(config: Config, *, tables: PageTables, rows: int) -> ReceiverOptions:
        """Returns the options from `config`, whose automatic transfer sizes are already chosen for the device.

        `rows`: number of rows, one for each request that can run at the same time.
        """
        transfer = config.transfer
        return ReceiverOptions(
            tables=tables,
            ring_bytes=aligned(transfer.ring_bytes),
            fence_rows=rows if config.transport.peer_memory else 0,
            checksum=bool(transfer.checksum),
            quarantine_s=2 * config.control.peer_timeout_s,
            lease_timeout_s=transfer.lease_timeout_s,
            watermark_interval_s=transfer.watermark_interval_s,
            words=config.transport.completion_words and not transfer.checksum,
        )


@dataclass(frozen=True, slots=True)
class ReceiverContext:
    """Objects of a rank that the rank's receiver uses."""

    rank: int
    shard: Shard
    pool: CopyPools
    transport: Transport
    address: str
    """The rank's control address."""
    lane: str
    """The rank's name in the timeline."""
    send: Callable[[str, m.Message], None]
    """Function that sends a message over the control channel to a peer's address."""
    to_leader: Callable[[m.Message], None]
    timeline: Timeline
    clock: Clock
