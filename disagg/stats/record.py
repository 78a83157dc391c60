"""Records the status of a server at regular intervals."""

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
    """The samples of a recording."""

    pictures: list[ServiceStatus]
    """The successful samples, oldest first."""
    failed: int
    """Number of failed samples."""
    trouble: str
    """Error of the last failed sample."""


def record(
    client: StatusClient,
    seconds: float,
    interval_s: float,
    on_sample: Callable[[float, str], None],
    *,
    clock: Clock = time.monotonic,
    wait: Callable[[float], None] = time.sleep,
) -> Recording:
    """Takes a sample at once and then every `interval_s`, until `seconds` have passed or until Ctrl-C.

    After each later sample, `on_sample` receives the elapsed seconds and the sample's error, or "". If the first
    sample fails, raises the error of `StatusClient.status`; later failed samples are skipped.
    """
    began_s = clock()
    pictures, failed, trouble = [_memory_of(client)], 0, ""
    try:
        samples = int(seconds / interval_s + 1e-6)  # in floats 0.3 / 0.1 is less than 3
        for number in range(1, samples + 1):
            wait(max(0.0, began_s + number * interval_s - clock()))
            now = ""
            try:
                pictures.append(_memory_of(client))
            except DisaggError as exc:
                failed, trouble = failed + 1, str(exc)
                now = trouble
            on_sample(clock() - began_s, now)
    except KeyboardInterrupt:
        pass  # the recording consists of the samples before Ctrl-C
    return Recording(pictures, failed, trouble)


def _memory_of(client: StatusClient) -> ServiceStatus:
    """Returns the server's status without its list of recent answers, which would fill memory in a long recording."""
    return replace(client.status(), recent=())
