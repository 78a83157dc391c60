"""Opens the storage that a group's `storage` setting names: a folder or a server."""

from __future__ import annotations

from pathlib import Path

from disagg.core.log import get_logger
from disagg.storage.appender import LEAST_SEGMENTS
from disagg.storage.bounce import aligned
from disagg.storage.contract import PageStorage
from disagg.storage.files import FileSettings, FileStorage
from disagg.storage.record import HEADER_BYTES
from disagg.storage.remote import RemoteSettings, RemoteStorage

log = get_logger(__name__)

_SEGMENT_BYTES = 64 << 20
_SEGMENTS = 8
"""Smallest number of segments of a folder. If the capacity is below this number of segments of `_SEGMENT_BYTES`,
smaller segments are used."""


def open_storage(where: str, capacity_bytes: int, largest_bytes: int) -> PageStorage:
    """Opens a folder, or the server of a URL; see `GroupConfig.storage`. Raises `ConfigError`.

    `capacity_bytes`: limit of the files of this process. `largest_bytes`: length of the largest page.
    """
    if "://" in where:
        return RemoteStorage(RemoteSettings(where))
    segment_bytes = max(
        _least_segment(largest_bytes), min(_SEGMENT_BYTES, aligned(capacity_bytes // _SEGMENTS // 2) * 2)
    )
    storage = FileStorage(FileSettings(Path(where).expanduser(), capacity_bytes, segment_bytes))
    pages = storage.statistics().pages
    log.info("storage_opened", storage=where, pages=pages, direct=storage.direct)
    return storage


def least_capacity(where: str, largest_bytes: int) -> int:
    """Returns the least `capacity_bytes` of `open_storage`; 0 for a server, which has its own limit."""
    return 0 if "://" in where else LEAST_SEGMENTS * _least_segment(largest_bytes)


def _least_segment(largest_bytes: int) -> int:
    return 2 * aligned(HEADER_BYTES + largest_bytes)  # a page may fill half of a segment
