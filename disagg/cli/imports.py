"""Imports of torch, Ray and transformers by a command."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disagg.commands.signals import exits_at_signal
from disagg.core.collection import collection_paused


@contextmanager
def heavy_imports() -> Iterator[None]:
    """Pauses garbage collection within the block, and makes Ctrl-C end the process at once.

    The imported packages catch `KeyboardInterrupt` in some of their modules, and would continue.
    """
    with exits_at_signal(), collection_paused():
        yield
