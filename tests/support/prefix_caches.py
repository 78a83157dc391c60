"""Prefix caches of groups in a test: switched on and off, and what they count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from disagg.core.config.read import Config
from disagg.kv.radix_values import RadixStatistics


def with_caches(config: Config, **roles: bool) -> Config:
    """`config` with the cache of some kinds of group on or off: `prefill=True`, `decode=False`."""
    for role, on in roles.items():
        group = msgspec.structs.replace(getattr(config, role), prefix_cache=on)
        config = msgspec.structs.replace(config, **{role: group})
    return config


def cache_of(ranks: Sequence[Any]) -> RadixStatistics:
    """Of a group that has one, by its ranks."""
    found: RadixStatistics | None = ranks[0].statistics()["leader"].memory.cache
    assert found is not None
    return found
