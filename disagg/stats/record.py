"""Looks at a server for a while and keeps what it says."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from msgspec.structs import replace

from disagg.core.errors import DisaggError
from disagg.core.ports import Clock
from disagg.core.status import ServiceStatus
from disagg.top.client import StatusClient


class Recording(NamedTuple):
    """What was seen, oldest first."""

    pictures: list[ServiceStatus]
    failed: int
    """Looks that found no status."""
    trouble: str
    """Why the last of those did not."""


def record(
    client: StatusClient,
    seconds: float,
    interval_s: float,
    looked: Callable[[float, str], None],
    *,
    clock: Clock = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Recording:
    """Looks at once, then each `interval_s` until `seconds` are over or Ctrl-C is pressed.

    After each look `looked` is called with the seconds gone, and what was wrong, if so. A server that cannot be asked
    is asked again; but at the start that raises, as `StatusClient.status`.
    """
    began_s = clock()
    pictures, failed, trouble = [_memory_of(client)], 0, ""
    try:
        looks = int(seconds / interval_s + 1e-6)  # 0.3 / 0.1 is less than 3
        for number in range(1, looks + 1):
            wait(max(0.0, began_s + number * interval_s - clock()))
            now = ""
            try:
                pictures.append(_memory_of(client))
            except DisaggError as exc:
                failed, trouble = failed + 1, str(exc)
                now = trouble
            looked(clock() - began_s, now)
    except KeyboardInterrupt:
        pass  # what was seen until now is the recording
    return Recording(pictures, failed, trouble)


def _memory_of(client: StatusClient) -> ServiceStatus:
    """Without the last answers: an hour of pictures should not hold them all."""
    return replace(client.status(), recent=())
