"""Random ids, drawn in batches: on some machines a system call takes longer than all other work on an id."""

from __future__ import annotations

import os

ID_BYTES = 16
IDS_AT_ONCE = 256

_unused: list[str] = []
os.register_at_fork(after_in_child=_unused.clear)  # otherwise parent and child would use the same ids


def random_id() -> str:
    """Returns 128 random bits from the operating system as 32 hexadecimal digits. Thread-safe."""
    while True:
        try:
            return _unused.pop()
        except IndexError:
            drawn = os.urandom(ID_BYTES * IDS_AT_ONCE).hex()
            size = 2 * ID_BYTES
            _unused.extend(drawn[at : at + size] for at in range(0, len(drawn), size))
