"""The system calls of a file storage, as one object: tests replace it to inject faults."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

from disagg.core.errors import ConfigError
from disagg.storage.bounce import ALIGNMENT, BounceBuffers

NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or quota."""


class Disk:
    """System calls on files. Each method may raise `OSError`. Stateless, so thread-safe."""

    def open(self, path: Path, flags: int) -> int:
        """Opens a file; a new file is readable by this user only. The caller closes the descriptor."""
        return os.open(path, flags | os.O_CLOEXEC, 0o600)

    def close(self, descriptor: int) -> None:
        """Closes a descriptor."""
        os.close(descriptor)

    def allocate(self, descriptor: int, nbytes: int) -> None:
        """Reserves disk space, so that later writes neither extend the file nor run out of space."""
        os.posix_fallocate(descriptor, 0, nbytes)

    def truncate(self, descriptor: int, nbytes: int) -> None:
        """Frees the reserved space of a file after its first `nbytes` bytes."""
        os.ftruncate(descriptor, nbytes)

    def size(self, descriptor: int) -> int:
        """Returns the length of a file."""
        return os.fstat(descriptor).st_size

    def is_removed(self, descriptor: int) -> bool:
        """Returns whether an open file has been removed from its folder."""
        return os.fstat(descriptor).st_nlink == 0

    def read(self, descriptor: int, into: memoryview, offset: int) -> int:
        """Reads until `into` is full or the file ends; returns the number of bytes read."""
        done = 0
        while done < len(into):
            count = os.preadv(descriptor, [into[done:]], offset + done)
            done += count
            # A direct read is short only at the file's end, where the unaligned offset allows no further direct read.
            if not count or count % ALIGNMENT:
                break
        return done

    def write(self, descriptor: int, data: memoryview, offset: int) -> None:
        """Writes all of `data`. Raises ENOSPC for a short write, because the disk is full."""
        if os.pwritev(descriptor, [data], offset) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def remove(self, path: Path) -> None:
        """Removes a file if it exists."""
        path.unlink(missing_ok=True)

    def names(self, folder: Path) -> list[str]:
        """Returns the names of a folder's files."""
        return [path.name for path in folder.iterdir()]


def direct_flag(folder: Path) -> int:
    """Returns `O_DIRECT` if the folder's file system supports direct I/O, else 0.

    Raises `ConfigError` if no file can be written to the folder.
    """
    path, memory = folder / f".probe-{secrets.token_hex(4)}", BounceBuffers().take(ALIGNMENT)
    try:
        with path.open("wb"):
            pass
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_DIRECT)
        except OSError:  # EINVAL: this file system has no direct I/O
            return 0
        try:
            direct = os.pwritev(descriptor, [memory], 0) == len(memory)
            return os.O_DIRECT if direct else 0
        except OSError as exc:
            if exc.errno in NO_SPACE:
                return os.O_DIRECT
            return 0
        finally:
            os.close(descriptor)
    except OSError as exc:
        raise ConfigError(f"the storage folder {folder} cannot be written: {exc.strerror}") from exc
    finally:
        path.unlink(missing_ok=True)
