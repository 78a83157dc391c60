"""Garbage collection in a process that imports large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

from disagg.core.model_index import models_indexed_once

YOUNG_OBJECTS = 10_000
"""Garbage collection threshold of the youngest generation in a server: new objects before a collection. A running
request has a few hundred objects."""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    One use is an import, see `imports_frozen`. The other use is the capture of CUDA graphs: a collection could free
    the graphs of an earlier model, which CUDA forbids during a capture.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def imports_frozen() -> Iterator[None]:
    """Disables garbage collection within the block, and excludes all objects at its end from later collections.

    For the import of torch and transformers, which creates a million objects that live as long as the process.
    Collections during the import would free nothing and take a quarter of its time. The first full collection
    afterwards would take 0.8 s. After an error nothing is excluded. See also `models_indexed_once`.
    """
    with collection_paused(), models_indexed_once():
        yield
        gc.freeze()


def collect_requests_only() -> None:
    """Excludes all current objects, such as imported packages, from garbage collection, and collects less often.

    Servers call this function, because each full collection would otherwise visit a million objects of packages. The
    function itself does not collect: a collection here would cost the time that `imports_frozen` has saved.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
