"""Garbage collection in a process that imports large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 10_000
"""Threshold of the youngest generation in a server, in objects. A running request has a few hundred objects."""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    The imports of torch and transformers use it: they create a million objects that live as long as the process.
    Collections during the imports would free nothing and take a quarter of the time. The capture of CUDA graphs uses
    it too: a collection could free the graphs of an earlier model, which CUDA forbids during a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_requests_only() -> None:
    """Excludes all current objects, such as imported packages, from garbage collection, and collects less often.

    Servers use it, because each full collection would otherwise visit a million objects of packages. This function
    itself does not collect: one collection takes as long as `collection_paused` saves.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
