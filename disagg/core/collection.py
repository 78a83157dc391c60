"""Garbage collection in a process that imports large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

YOUNG_OBJECTS = 10_000
"""New objects after which a server looks for cycles among them; a request in progress has some hundred objects."""


@contextlib.contextmanager
def collection_paused() -> Iterator[None]:
    """Disables garbage collection within the block.

    For imports of torch and transformers: a million objects that live as long as the process. Collections during the
    import visit them repeatedly and free nothing, which takes a quarter of the import's time. Also while steps are
    recorded: a collection could free the graphs of an earlier model, which CUDA does not allow during a recording.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def collect_requests_only() -> None:
    """Excludes what lives now, such as imported packages, from garbage collection, and collects less often.

    For servers. A full collection would visit a million objects of packages, again and again while requests come. It
    is left out here too: it would take as long as `collection_paused` saves.
    """
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 20, 20)
