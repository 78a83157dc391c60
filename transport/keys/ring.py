"""The keys of a running process: reloaded from a key file, or set by the owner of the cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import structlog

from disagg.core.errors import ConfigError
from transport.keys.curve import ControlKeys, KeySet
from transport.keys.file import load_keys

log = structlog.get_logger(__name__)

POLL_S = 2.0
"""Interval between checks of the key file; a check runs when `generations` is read."""

_Signature = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True)
class KeyState:
    """Names of a ring's generations at one moment. The names reveal no secrets."""

    presented: str
    accepted: tuple[str, ...]
    """All valid generations, `presented` first."""
    next_from_unix_s: float | None
    """Time at which the presented generation changes; None when no change is planned."""


class KeyRing:
    """The valid generations of a process's keys. Any thread may use a ring.

    A ring has no thread: reading `generations` checks the file and the clock.
    """

    def __init__(
        self,
        keys: ControlKeys | KeySet,
        file: Path | None = None,
        *,
        poll_s: float = POLL_S,
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """With `file`, the ring reloads later changes of this file. `KeyRing.follow` also reads the file first."""
        self._keys = keys if isinstance(keys, KeySet) else KeySet(keys)
        self._file, self._poll_s, self._unix_clock = file, poll_s, unix_clock
        self._lock = threading.Lock()
        self._seen = _signature(file)
        self._look_at_s = time.monotonic() + poll_s
        self._complaint = ""
        self._reported = self._state_now()

    @classmethod
    def follow(
        cls, file: str | Path, *, poll_s: float = POLL_S, unix_clock: Callable[[], float] = time.time
    ) -> KeyRing:
        """Returns a ring that follows `file`. Raises `ConfigError` when the file cannot be read now."""
        path = Path(file).expanduser()
        seen = _signature(path)  # before the read: the next check detects a change in between
        ring = cls(load_keys(path), path, poll_s=poll_s, unix_clock=unix_clock)
        ring._seen = seen
        return ring

    @property
    def generations(self) -> tuple[ControlKeys, ...]:
        """Returns the valid generations: the first is presented to peers, all are accepted from peers."""
        with self._lock:
            self._refresh()
            return self._keys.generations(self._unix_clock())

    @property
    def keys(self) -> KeySet:
        """Returns the current key set, to be sent to another process. The key set contains secrets."""
        with self._lock:
            self._refresh()
            return self._keys

    def state(self) -> KeyState:
        """Returns the names of the presented and the accepted generations."""
        with self._lock:
            self._refresh()
            return self._state_now()

    def replace(self, keys: KeySet) -> None:
        """Replaces all keys of the ring."""
        with self._lock:
            self._keys = keys
            self._say()

    def __repr__(self) -> str:
        """Returns text with the names of the keys only, because a repr can end up in a log."""
        return f"KeyRing({', '.join(self._reported.accepted)})"

    # --- with the lock held

    def _refresh(self) -> None:
        now_s = time.monotonic()
        if self._file is not None and now_s >= self._look_at_s:
            self._look_at_s = now_s + self._poll_s
            self._look(self._file)
        self._say()

    def _look(self, file: Path) -> None:
        found = _signature(file)
        if found == self._seen:
            return
        try:
            self._keys = load_keys(file)
        except ConfigError as exc:
            # The old keys stay valid; the file is read again until it holds valid keys.
            if str(exc) != self._complaint:
                self._complaint = str(exc)
                log.warning(
                    "key_file_not_read", error=self._complaint, keeps="the keys from the last valid file"
                )
            return
        self._seen, self._complaint = found, ""

    def _state_now(self) -> KeyState:
        now = self._unix_clock()
        names = tuple(keys.name for keys in self._keys.generations(now))
        pending = self._keys.next is not None and not self._keys.is_rotated(now)
        return KeyState(names[0], names, self._keys.next_from_unix_s if pending else None)

    def _say(self) -> None:
        state = self._state_now()
        if state != self._reported:
            self._reported = state
            log.info(
                "control_keys",
                presented=state.presented,
                accepted=state.accepted,
                next_from_unix_s=state.next_from_unix_s,
            )


AnyKeys = KeyRing | KeySet | ControlKeys
"""Keys of a channel: a ring, whose changes the channel follows, or fixed keys."""


def as_ring(keys: AnyKeys) -> KeyRing:
    """Returns the ring itself, or a ring of the given fixed keys."""
    return keys if isinstance(keys, KeyRing) else KeyRing(keys)


def _signature(file: Path | None) -> _Signature | None:
    """Returns a value that differs after each change of the file or of a symbolic link to it; None if `stat`
    fails."""
    if file is None:
        return None
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns, found.st_size
