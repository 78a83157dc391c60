"""Calibrates a new link to a decode group: measures its wire, and derives segment size and number of layer groups.

A wire is the cost model of a connection: seconds per segment and bytes per second. `prefill_node.probe` times
messages on the transfer thread, `staging.wire` fits the model, and this file applies and reports the result.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch

from disagg.core.config.read import Config, TransferConfig
from disagg.core.types import RankInfo
from disagg.node.device import device_name
from disagg.node.links import Link
from disagg.node.transfer_loop import TransferLoop
from disagg.node.wire_cache import WireCache, cache_path
from prefill_node.probe import Probed
from prefill_node.sender import SegmentSender
from prefill_node.wire_summary import Calibration
from staging.wire import MIB, PROBE_LIMIT_S, Wire, best_segment_bytes

ANSWER_S = PROBE_LIMIT_S + 5.0
"""Longest wait for a probe's result. The transfer thread ends a probe earlier, so only a blocked transfer thread
exceeds this limit."""
_COPIES_S = 80e-6
"""Cost of a segment's gather and scatter on a GPU, host work included; the probe does not measure this cost. The
value is a segment's total cost (docs/performance.md) minus the cost of its message."""


@dataclass(frozen=True)
class Calibrator:
    """Calibrates the links of one prefill rank. Do not call on the transfer thread, which runs the measurement."""

    rank: int
    configured: Config
    """The user's configuration."""
    sized: TransferConfig
    """The transfer settings with every automatic value chosen."""
    device: torch.device
    chunk_tokens: int
    agent: SegmentSender
    loop: TransferLoop

    @property
    def wanted(self) -> bool:
        """Whether this rank measures its links, by `transfer.calibrate`: `auto` measures on GPUs only."""
        mode = self.configured.transfer.calibrate
        return mode == "always" or (mode == "auto" and self.device.type == "cuda")

    def run(self, link: Link) -> Calibration:
        """Measures the wire to one decode rank of the link, or loads the wire from the cache; returns a log summary.

        Later segments to the link's decode group are sized for this wire.
        """
        probed = self._probe(link)
        if probed.wire is not None:
            self.loop.call(partial(self.agent.cutter.use_wire, link, *self._choose(probed.wire)))
        return self._in_words(link, probed)

    def _probe(self, link: Link) -> Probed:
        transfer, probed = self.configured.transfer, Probed(why="this rank sends nothing to that group")
        if (
            transfer.segment_overhead_s is not None
            and transfer.wire_bytes_per_s
            and transfer.max_segment_bytes
        ):
            return Probed(why="the wire and the segment size are configured")
        cache = _cache()
        wires = cache.load() if cache is not None and transfer.calibrate == "auto" else {}
        for peer in link.destinations_of(self.rank):
            probed = self._probe_one(peer, link.prefill.transport, wires)
            if not probed.writable:
                break
        if probed.wire is not None and not probed.cached and cache is not None:
            cache.store(self._key(link.prefill.transport, probed.host, probed.device), probed.wire)
        return probed

    def _probe_one(self, peer: RankInfo, transport: str, wires: Mapping[str, Wire]) -> Probed:
        over = threading.Event()
        ended: list[Probed] = []

        def done(probed: Probed) -> None:
            ended.append(probed)
            over.set()

        def known(host: str, device: str) -> Wire | None:
            return wires.get(self._key(transport, host, device))

        start = self.agent.prober.start
        self.loop.post(partial(start, peer.control_address, peer.ring_bytes, known, done))
        return ended[0] if over.wait(ANSWER_S) else Probed(why="the transfer thread is blocked", begun=True)

    def _key(self, transport: str, host: str, device: str) -> str:
        """Returns the cache key of a wire: hosts, devices and transport, and for UCX its version and settings."""
        about = [f"{socket.gethostname()}, {device_name(self.device)} to {host}, {device}", transport]
        if transport.startswith("ucx-"):
            from transport.ucx.library import settings, version

            about += [version(), settings(os.environ)]
        return "; ".join(part for part in about if part)

    def _choose(self, wire: Wire) -> tuple[Wire, int]:
        """Returns the wire to use and the largest segment in bytes. Explicit settings override measured values."""
        configured = self.configured.transfer
        whole_s = wire.overhead_s + (_COPIES_S if self.device.type == "cuda" else 0.0)
        overhead_s = whole_s if configured.segment_overhead_s is None else configured.segment_overhead_s
        best_bytes = best_segment_bytes(wire, self.sized.segment_limit_bytes)
        used = Wire(overhead_s, configured.wire_bytes_per_s or wire.bytes_per_s)
        return used, configured.max_segment_bytes or best_bytes

    def _in_words(self, link: Link, probed: Probed) -> Calibration:
        sized = self.sized
        staging = f"staging and ring, by {link.prefill.transport}"
        wire = Wire(sized.segment_overhead_s or 0.0, sized.wire_bytes_per_s)
        segment = sized.segment_limit_bytes
        if probed.wire is not None:
            source, how = ("cached" if probed.cached else "measured"), probed.wire
            wire, segment = self._choose(probed.wire)
            found = f"{source}: {_words(how)}"
        else:
            why = "the decode pool is written directly" if probed.writable else probed.why
            found = f"not measured ({why}): {_words(wire)} are assumed"
        groups = len(self.agent.cutter.groups_for(self.chunk_tokens, link))
        chosen = f"a chunk of {self.chunk_tokens} tokens leaves in {groups} layer group{'s' * (groups > 1)}"
        limit = "" if probed.writable else f", in segments of {segment / MIB:.3g} MiB at most"
        return Calibration(
            "peer memory" if probed.writable else staging, found, chosen + limit, failed=probed.begun
        )


def _words(wire: Wire) -> str:
    return f"{wire.overhead_s * 1e6:.3g} us for one more segment and {wire.bytes_per_s / 1e9:.3g} GB/s"


def _cache() -> WireCache | None:
    try:
        return WireCache(cache_path(os.environ))
    except RuntimeError:  # the user has no home directory
        return None
