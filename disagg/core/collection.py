"""Garbage collection while a process imports large packages."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
