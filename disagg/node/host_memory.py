"""Host memory of a rank: the memory that is available, and the share of it that the prefix cache's second tier takes.

`disagg.node.prefix_caching` decides whether a rank chooses this share.

The memory of the second tier is pinned before the rank is ready (`disagg.kv.host_slabs`).
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

CGROUPS = Path("/sys/fs/cgroup")
PROC = Path("/proc")
AVAILABLE_SHARE = 4
"""Divisor of the available host memory: the second tiers of all ranks of a host, and their memory for swapped pages,
take at most a quarter of it. The rest is for other processes, the page cache, and groups that start later."""
LEFT_SHARE = 8
"""Divisor of the memory of the host or container: so much stays available when memory is pinned, because groups that
start at the same time measure the same available memory."""
POOL_MULTIPLE = 4
"""Largest size of an automatic second tier, as a multiple of the rank's pool."""
REPEATED_SHARE = 4
"""Divisor of the pool: a second tier of less than a quarter of the pool is useless, if every cached page is copied to
it. It would have only pages that the pool itself still has, beside running requests."""


class HostCacheSize(NamedTuple):
    """Size of the second tier of a rank, with the reason."""

    nbytes: int
    reason: str


class HostCacheRoom(NamedTuple):
    """Sizes from which a rank chooses the size of its second tier, in bytes."""

    available_bytes: int
    """Host memory that is available to all ranks of this host."""
    host_ranks: int
    """Number of ranks on this host that start together."""
    pool_bytes: int
    """Device memory of the rank for KV and cached recurrent states."""
    swap_bytes: int = 0
    """Host memory of the rank for preempted requests."""

    @property
    def share_bytes(self) -> int:
        """The rank's share of the available memory, without the memory for preempted requests."""
        return max(0, self.available_bytes // AVAILABLE_SHARE // self.host_ranks - self.swap_bytes)


def automatic_host_cache(room: HostCacheRoom, *, repeats_pool: bool) -> HostCacheSize:
    """Returns the size of a second tier that the user has not set.

    `repeats_pool`: see `disagg.node.prefix_caching.repeats_pool`; a small tier is useless then, so there is none.
    """
    most_bytes = POOL_MULTIPLE * room.pool_bytes
    if room.share_bytes >= most_bytes:
        return HostCacheSize(most_bytes, f"automatic: {POOL_MULTIPLE} times the pool")
    share = (
        f"1/{AVAILABLE_SHARE} of the available {_gib(room.available_bytes)} / {room.host_ranks} ranks here"
        + (f" - swap {_gib(room.swap_bytes)}" if room.swap_bytes else "")
    )
    if repeats_pool and room.share_bytes < room.pool_bytes // REPEATED_SHARE:
        return HostCacheSize(0, f"automatic: none, {share} is less than 1/{REPEATED_SHARE} of the pool")
    return HostCacheSize(room.share_bytes, f"automatic: {share}")


def pinnable_bytes() -> int:
    """Returns how much memory may be pinned now, so that 1/`LEFT_SHARE` of the memory stays available."""
    return available_bytes() - total_bytes() // LEFT_SHARE


def total_bytes(cgroups: Path = CGROUPS) -> int:
    """Returns the memory that this process may use: the smaller of the container's limit and the host's memory."""
    import psutil

    limit = _limit_bytes(cgroups)
    total = int(psutil.virtual_memory().total)
    return total if limit is None else min(total, limit)


def available_bytes(cgroups: Path = CGROUPS, proc: Path = PROC) -> int:
    """Returns the memory that this process can still allocate.

    The smaller of the host's available memory, and of the container's limit less the container's use. Files in the
    page cache count as available. A host that does not overcommit refuses address ranges beyond its commit limit.
    """
    import psutil

    available = int(psutil.virtual_memory().available)
    if _number(proc / "sys" / "vm" / "overcommit_memory") == 2:
        available = min(available, _uncommitted_bytes(proc))
    limit = _limit_bytes(cgroups)
    if limit is None:
        return available
    used = _number(cgroups / "memory.current") or _number(cgroups / "memory" / "memory.usage_in_bytes") or 0
    return max(0, min(available, limit - used + _file_bytes(cgroups)))


def _limit_bytes(cgroups: Path) -> int | None:
    """Returns the limit of the container (cgroup v2 or v1); None without one."""
    limit = _number(cgroups / "memory.max")
    return limit if limit is not None else _number(cgroups / "memory" / "memory.limit_in_bytes")


def _uncommitted_bytes(proc: Path) -> int:
    """Returns the size of the address ranges that a host without overcommitment still grants."""
    lines = (proc / "meminfo").read_text().splitlines()
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return max(0, kib["CommitLimit"] - kib["Committed_AS"]) << 10


def _file_bytes(cgroups: Path) -> int:
    """Returns the part of the container's use that is the page cache's, and that the kernel reclaims first."""
    for path, name in (
        (cgroups / "memory.stat", "inactive_file"),
        (cgroups / "memory" / "memory.stat", "total_inactive_file"),
    ):
        try:
            fields = dict(line.split() for line in path.read_text().splitlines())
            return int(fields[name])
        except (OSError, ValueError, KeyError):
            continue
    return 0


def _number(path: Path) -> int | None:
    """Returns the number in a file; None if there is no such file, or no number (`max`)."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _gib(nbytes: int) -> str:
    return f"{nbytes / (1 << 30):.3g} GiB"
