"""Segments: files of many records, and the state that a storage keeps for each file."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"([0-9a-f]{16})-(\d{8})\.pages")
_INDEX_NAME = re.compile(r"\.?([0-9a-f]{16}-\d{8})\.index(\..+)?")
LOCK_SUFFIX, PAGES_SUFFIX, INDEX_SUFFIX = ".lock", ".pages", ".index"


@dataclass(eq=False, slots=True)
class SegmentFile:
    """One segment file. The lock of its storage guards all fields that change."""

    path: Path
    writer: str
    """Id of the storage that wrote the file; its lock file shows whether a process owns the segment."""
    number: int
    owned: bool
    """Whether this process may write, evict and remove the segment."""
    end_bytes: int = 0
    """End of the known records: the owner appends the next record here, and other processes search for it here."""
    sealed: bool = False
    """Whether the segment receives no more records; its side index is then written."""
    keys: list[bytes] = field(default_factory=list)
    """Keys of the records. The index may meanwhile have another location for a key."""
    gone: bool = False
    """Whether the segment was evicted or vanished; the index then adds no more of its pages."""
    modified_s: float = 0.0
    """Time of the segment's last write when this process found the segment; oldest segments are evicted first."""

    @property
    def index_path(self) -> Path:
        """Path of the side index, which is written when the segment is sealed."""
        return self.path.with_suffix(INDEX_SUFFIX)


@dataclass(eq=False, slots=True)
class Location:
    """Location of a page's record in a segment."""

    segment: SegmentFile
    offset_bytes: int
    length_bytes: int
    """Length of the content."""
    used: bool = False
    """Whether the page was read, or put again, since it was written. Eviction moves used pages to another segment."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One record of a segment, from its header or the side index."""

    key: bytes
    offset_bytes: int
    length_bytes: int


def segment_path(folder: Path, writer: str, number: int) -> Path:
    """Returns the path of a segment file."""
    return folder / f"{writer}-{number:08d}{PAGES_SUFFIX}"


def parse_name(name: str) -> tuple[str, int] | None:
    """Returns writer and number of a segment file's name; None for other files."""
    match = _NAME.fullmatch(name)
    return (match[1], int(match[2])) if match else None


def index_segment(name: str) -> str | None:
    """Returns the segment file's name for the name of a side index, complete or half-written; None for other
    files."""
    match = _INDEX_NAME.fullmatch(name)
    return f"{match[1]}{PAGES_SUFFIX}" if match else None


def lock_writer(name: str) -> str | None:
    """Returns the writer's id for the name of a lock file; None for other files."""
    writer = name.removesuffix(LOCK_SUFFIX)
    return writer if writer != name and re.fullmatch(r"[0-9a-f]{16}", writer) else None
