"""The result of a calibration. The process of a cluster logs it, and need not load torch or kernels for it."""

from __future__ import annotations

from dataclasses import dataclass

OVERRIDE = (
    "set transfer.segment_overhead_s, wire_bytes_per_s, max_segment_bytes; or transfer.calibrate=off, always"
)


@dataclass(frozen=True, slots=True)
class Calibration:
    """Result for one link as text: the fields of a log line."""

    path: str
    """Path of the KV: peer memory, or staging and the transport."""
    found: str
    """The wire, and whether it was measured, cached or assumed."""
    chosen: str
    """The chosen number of layer groups and size of the largest segment."""
    failed: bool = False
    """Whether a measurement started and failed."""
