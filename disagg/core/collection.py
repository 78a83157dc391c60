"""Garbage collection in a process that imports large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 10_000
"""Garbage collection threshold of the youngest generation in a server: new objects before a collection. A running
request has a few hundred objects."""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    One use is the import of torch and transformers, which creates a million objects that live as long as the process.
    Collections during this import would free nothing and take a quarter of the import's time. The other use is the
    capture of CUDA graphs: a collection could free the graphs of an earlier model, which CUDA forbids during a
    capture.
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

    Servers call this function, because each full collection would otherwise visit a million objects of packages. The
    function itself does not collect: a collection here would cost the time that `collection_paused` has saved.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
