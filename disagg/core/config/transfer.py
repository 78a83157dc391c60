"""The sections `transfer` and `transport`: how KV moves from prefill to decode ranks."""

from __future__ import annotations

from typing import Literal

import msgspec

from disagg.core.config.section import MIB, Section
from disagg.core.types import CHECKSUM_BYTES

MAX_TLS_LANES = 16
Calibrate = Literal["auto", "always", "off"]
TransportName = Literal["auto", "ucx", "tls", "inproc"]
_WITHIN_A_HOST = ("inproc", "ucx-shm")
"""Transports within one host, by their names in the handshake."""


class TransferConfig(Section, frozen=True):
    """Settings of the transfer of KV from prefill to decode ranks."""

    ring_bytes: int = 0
    """Size of each decode rank's receive ring. 0: 1/128 of a GPU's memory, from 64 MiB to 1 GiB; 32 MiB on a
    CPU."""
    staging_bytes: int = 0
    """Size of each prefill rank's staging buffer; 0: as for `ring_bytes`."""
    layer_groups: int = 4
    """Largest number of layer groups. A layer group is sent while the next one computes."""
    calibrate: Calibrate = "auto"
    """Whether prefill ranks, when groups link, measure `segment_overhead_s`, `wire_bytes_per_s` and
    `max_segment_bytes` if these are unset. auto: on a GPU, for pairs of ranks not in the cache
    (`disagg.node.wire_cache`); always: at every start, also on a CPU; off: never."""
    segment_overhead_s: float | None = None
    """Fixed cost of each segment, used to choose the number of layer groups (`staging.planner.group_count`). None:
    measured; without a measurement 100 us on a GPU (NVLink, with both copies), 0 on a CPU."""
    wire_bytes_per_s: float = 0.0
    """Bandwidth between two ranks, also used to choose the number of layer groups. 0: measured; without a measurement
    350e9 (NVLink 4)."""
    lease_timeout_s: float = 30.0
    """Time limit for granting and writing a ring lease. On a timeout the request fails, and the lease is freed after
    a fence."""
    watermark_interval_s: float = 0.25
    """Interval at which a decode rank repeats its latest watermark (the ring position up to which space is free)."""
    max_segment_bytes: int = 0
    """Largest segment; 0: chosen from the measured bandwidth, at most a quarter of the smaller of ring and staging
    buffer."""
    checksum: bool | None = None
    """Whether each segment carries a 64-bit checksum. The decode rank checks the bytes copied from its ring, or its
    pages after direct writes, before the prompt counts as landed. A damaged segment is sent once more; a second
    mismatch fails the request. All groups must have the same value. None: only if KV crosses a network; within one
    host checksums cost small prompts more than 2 % of the transfer rate."""
    spin_s: float = 0.005
    """Time that a rank on a GPU polls after the last traffic before it sleeps; a wake-up takes up to 1 ms."""
    drain_timeout_s: float = 10.0
    """Time for running transfers to finish at shutdown; transfers that still run afterwards are aborted."""

    def __post_init__(self) -> None:
        for name in ("ring_bytes", "staging_bytes"):
            if getattr(self, name) != 0:
                self._at_least(4096, name)
        self._one_of("calibrate", Calibrate)
        self._at_least(1, "layer_groups")
        self._at_least(0, "max_segment_bytes", "spin_s", "wire_bytes_per_s", "segment_overhead_s")
        self._positive("lease_timeout_s", "drain_timeout_s")
        self._at_least(0.001, "watermark_interval_s")  # a shorter interval would overload the transfer thread
        smaller = min((n for n in (self.ring_bytes, self.staging_bytes) if n), default=0)  # 0: see `sized`
        self._needs(
            self.max_segment_bytes <= smaller or smaller == 0,
            "max_segment_bytes",
            f"at most the smaller of ring_bytes and staging_bytes ({smaller})",
        )
        self._needs(
            self.watermark_interval_s < self.lease_timeout_s,
            "watermark_interval_s",
            f"less than lease_timeout_s ({self.lease_timeout_s:g})",
        )

    def sized(self, gpu_memory_bytes: int) -> TransferConfig:
        """Returns the section with device-dependent defaults resolved; `gpu_memory_bytes` is 0 on a CPU.

        Ring and staging buffer have 1/128 of a GPU's memory each, from 64 MiB to 1 GiB; 32 MiB on a CPU.
        """
        automatic = max(64 * MIB, min(gpu_memory_bytes // 128, 1024 * MIB)) if gpu_memory_bytes else 32 * MIB
        overhead_s = self.segment_overhead_s
        return msgspec.structs.replace(
            self,
            ring_bytes=self.ring_bytes or automatic,
            staging_bytes=self.staging_bytes or automatic,
            segment_overhead_s=(1e-4 if gpu_memory_bytes else 0.0) if overhead_s is None else overhead_s,
            wire_bytes_per_s=self.wire_bytes_per_s or 350e9,
        )

    def checks(self, transport: str) -> bool:
        """Returns whether segments carry checksums over `transport`, a name from the handshake."""
        return transport not in _WITHIN_A_HOST if self.checksum is None else self.checksum

    @property
    def segment_limit_bytes(self) -> int:
        """Largest planned segment: `max_segment_bytes`, or a quarter of the smaller of ring and staging buffer, so
        four segments with checksums can be in flight."""
        quarter = min(self.ring_bytes, self.staging_bytes) // 4
        return self.max_segment_bytes or (quarter if self.checksum is False else quarter - CHECKSUM_BYTES)


class TransportConfig(Section, frozen=True):
    """Settings of the transport: the backend that carries KV between ranks."""

    backend: TransportName = "auto"
    """Transport between ranks. auto: UCX over shared memory on one host (a loopback `control.host`). Between hosts:
    UCX over RDMA, else UCX over TCP on a trusted network, else tls. ucx: as auto, but without tls. tls: always TLS
    over TCP."""
    tls_lanes: int = 0
    """Connections per peer over which the TLS transport spreads a large message; each uses a core while sending. 0:
    half of the process's cores, from 1 to 2."""
    trusted_network: bool = False
    """Whether UCX over TCP between hosts is allowed. UCX's TCP is neither authenticated nor encrypted: a machine that
    reaches its port can read and write the memory of the rank."""
    peer_memory: bool = True
    """Whether prefill ranks write directly to a decode rank's pool if they can map it. Otherwise KV goes through
    staging."""
    completion_words: bool = False
    """Whether prefill ranks report direct writes by words of shared host memory, which their device stores, instead
    of messages. Applies to segments without checksums, on x86-64; both ranks need one user and one PID
    namespace."""

    def __post_init__(self) -> None:
        self._one_of("backend", TransportName)
        self._needs(0 <= self.tls_lanes <= MAX_TLS_LANES, "tls_lanes", f"from 0 to {MAX_TLS_LANES}")
