"""Protects a command's imports of torch, Ray and transformers, which take seconds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from disagg.commands.signals import exits_at_signal
from disagg.core.collection import imports_frozen


@contextmanager
def heavy_imports() -> Iterator[None]:
    """See `imports_frozen`. Within the block, Ctrl-C ends the process at once.

    Some modules of these packages catch `KeyboardInterrupt` during their import, and would continue.
    """
    with exits_at_signal(), imports_frozen():
        yield
