"""Completion words: shared host memory in which a prefill rank reports its direct writes to a decode rank.

The decode rank owns one *board* for each prefill rank, and the prefill rank maps the board. A board has slots. To
report a write, the prefill rank takes a free slot, enters the tag and the `Written` record, and queues on the device,
after the write, the store of a number into the slot's *word*. The decode rank compares all words with the numbers
that it has seen, and reads the slots that differ. So a write is reported without a message, and without an event.

    page     content                        written by
    0        id of the board                decode rank, once
    0        `asleep`                       decode rank: it polls no words, so notifications are sent too
    0        `begun_s`                      prefill rank: time at which the device began its latest write
    1        word of each slot, uint32      prefill rank's device
    2        numbers seen, uint32           decode rank; a slot is free when both are equal
    3, ...   tag and record of each slot    prefill rank

The memory has no name: the prefill rank opens it through `/proc`, as UCX does, which needs the same user and the same
PID namespace. Without that, a prefill rank uses completion notifications, which are also used when no slot is free,
and on processors other than x86-64.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import stat
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np

from disagg.core.errors import ProtocolError, TransportError
from transport.completion_notifications import NOTIFICATION_BYTES, Written
from transport.handles import BoardHandle
from transport.peer_memory import host_id

SLOTS = 256
"""Slots of a board: the largest number of writes that one prefill rank has under way without notifications."""
_PAGE = 4096
_ID_BYTES = 16
_RECORD_BYTES = 2 + NOTIFICATION_BYTES
_WORDS, _SEEN, _TAGS, _RECORDS = _PAGE, 2 * _PAGE, 3 * _PAGE, 4 * _PAGE
_BOARD_BYTES = _RECORDS + -(-SLOTS * _RECORD_BYTES // _PAGE) * _PAGE
_LARGEST = (1 << 32) - 1
_MACHINES = ("x86_64", "AMD64")
"""Processors that load in program order: a slot is read after its word, without a barrier."""


class Reported(NamedTuple):
    """One slot that a prefill rank has filled."""

    tag: int
    """Tag of the segment, uint64."""
    record: bytes
    """The encoded `Written`, not checked yet."""

    def read(self) -> Written:
        """Decodes the record. Raises `ProtocolError`."""
        try:
            return _DECODER.decode(self.record)
        except msgspec.DecodeError as exc:
            raise ProtocolError(f"the record of a completion word cannot be decoded: {exc}") from exc


class _Mapped:
    """Views of a mapped board. Each view keeps the mapping alive."""

    def __init__(self, file: int) -> None:
        self.memory = mmap.mmap(file, _BOARD_BYTES)
        self.asleep: Any = np.frombuffer(self.memory, np.uint32, 1, _ID_BYTES)
        self.begun_s: Any = np.frombuffer(self.memory, np.float64, 1, 2 * _ID_BYTES)
        self.words: Any = np.frombuffer(self.memory, np.uint32, SLOTS + 1, _WORDS)
        """One word for each slot, and one more for a trial."""
        self.seen: Any = np.frombuffer(self.memory, np.uint32, SLOTS, _SEEN)
        self.tags: Any = np.frombuffer(self.memory, np.uint64, SLOTS, _TAGS)
        self.records = memoryview(self.memory)[_RECORDS:]

    @property
    def id(self) -> bytes:
        return self.memory[:_ID_BYTES]


class Board:
    """A decode rank's side of a board. Owned by the transfer thread."""

    def __init__(self) -> None:
        """Raises `TransportError` if the system has no anonymous files, or if its processors may reorder loads."""
        if platform.machine() not in _MACHINES:
            raise TransportError(f"no completion words on {platform.machine()}: it reorders loads")
        try:
            self._file = os.memfd_create("disagg-completion-words", os.MFD_CLOEXEC)
            os.fchmod(self._file, 0o600)
            os.ftruncate(self._file, _BOARD_BYTES)
        except (AttributeError, OSError) as exc:
            raise TransportError(f"no shared memory for completion words: {exc}") from exc
        self._close = weakref.finalize(self, os.close, self._file)
        self._views = _Mapped(self._file)
        self._id = secrets.token_bytes(_ID_BYTES)
        self._views.memory[:_ID_BYTES] = self._id
        self._words, self._seen = self._views.words[:SLOTS], self._views.seen

    @property
    def handle(self) -> BoardHandle:
        """Handle for the prefill rank to which this board belongs."""
        return BoardHandle(host_id(), os.getpid(), self._file, self._id)

    def begun(self, now_s: float, within_s: float) -> bool:
        """Returns whether the latest write has begun on the device less than `within_s` before `now_s`.

        Times are those of `time.monotonic()`, which is equal for all processes of a host in one time namespace. If
        the prefill rank is in a different namespace, its time can lie in the future. A time more than `within_s`
        after `now_s` therefore does not count.
        """
        return bool(abs(now_s - self._views.begun_s[0]) < within_s)

    def sleep(self) -> None:
        """Asks the prefill rank for notifications, because this rank blocks on its transport; see `wake`.

        Only a completion word reports a write that has completed before this call: call `changed` afterwards.
        """
        self._views.asleep[0] = 1

    def wake(self) -> None:
        """Reverts `sleep`: this rank calls `take` often from now on, so completion words alone report writes."""
        self._views.asleep[0] = 0

    @property
    def changed(self) -> bool:
        """True if `take` would yield a slot."""
        return bool(self._words.tobytes() != self._seen.tobytes())

    def take(self) -> Iterator[Reported]:
        """Yields the slots whose write has completed since the last call, and frees them."""
        if not self.changed:
            return
        words = self._words.copy()  # a word can change while the slots are read
        for slot in np.flatnonzero(words != self._seen).tolist():
            at = slot * _RECORD_BYTES
            nbytes = int.from_bytes(self._views.records[at : at + 2], "little")
            record = bytes(self._views.records[at + 2 : at + 2 + min(nbytes, NOTIFICATION_BYTES)])
            reported = Reported(int(self._views.tags[slot]), record)
            self._seen[slot] = words[slot]
            yield reported

    def close(self) -> None:
        """Closes the file. The prefill rank's mapping stays valid, and its later stores have no effect here."""
        self._close()


class OpenBoard:
    """A prefill rank's side of a board. Owned by the transfer thread."""

    def __init__(self, handle: BoardHandle) -> None:
        """Maps a board. Raises `TransportError` when this process cannot open the memory."""
        if handle.host != host_id():
            raise TransportError("the completion words are on another host")
        path = Path(f"/proc/{handle.process}/fd/{handle.file}")
        try:
            # The number can belong to another file, in another PID namespace or after the board was closed.
            found = path.stat()
            if not stat.S_ISREG(found.st_mode) or found.st_size != _BOARD_BYTES:
                raise TransportError(f"{path} is not a board of completion words")
            file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._views = _Mapped(file)
            finally:
                os.close(file)
        except (OSError, ValueError) as exc:
            raise TransportError(f"the completion words cannot be mapped: {exc}") from exc
        if self._views.id != handle.id:
            raise TransportError(f"{path} is another board of completion words")
        self.id = handle.id
        self.words: Any = self._views.words
        """The words, uint32 `[SLOTS + 1]`: the device stores into them."""
        self._numbers: list[int] = self._views.seen.tolist()
        """Number of the latest report of each slot."""
        self._next = 0
        self.closed = False
        """True once the decode rank is lost: no report reaches it."""

    @property
    def asleep(self) -> bool:
        """True while the decode rank does not poll the words."""
        return bool(self._views.asleep[0])

    def begin(self, now_s: float) -> None:
        """Announces that the device has begun a write."""
        self._views.begun_s[0] = now_s

    def post(self, tag: int, written: Written) -> WordReport | None:
        """Enters a report into a free slot; None if the next slot is not free, or the board is closed.

        The caller queues the store of `WordReport.number` into the slot's word, or calls `WordReport.cancel`.
        """
        slot = self._next
        number = self._numbers[slot]
        if self.closed or self._views.seen[slot] != number or self.words[slot] != number:
            return None
        body = _ENCODER.encode(written)
        at = slot * _RECORD_BYTES
        self._views.records[at : at + 2 + len(body)] = len(body).to_bytes(2, "little") + body
        self._views.tags[slot] = tag
        self._next = (slot + 1) % SLOTS
        self._numbers[slot] = number + 1 if number < _LARGEST else 1
        return WordReport(self, slot, self._numbers[slot])

    def stored(self, slot: int, number: int) -> bool:
        """Returns whether the device has stored the number of a report, or of a later one in the same slot."""
        return bool(self.words[slot] == number) or self._numbers[slot] != number

    def cancel(self, slot: int) -> None:
        """Frees the slot of a report whose number was not queued; see `post`."""
        self._numbers[slot] = int(self.words[slot])


class WordReport:
    """A report in a slot, used like a device event. It is complete when the device has stored `number`, the slot's
    next number, into the slot's word."""

    __slots__ = ("board", "number", "slot")

    def __init__(self, board: OpenBoard, slot: int, number: int) -> None:
        self.board, self.slot, self.number = board, slot, number

    def query(self) -> bool:
        """Returns whether the device has stored the number, and therefore the whole write before it."""
        return self.board.stored(self.slot, self.number)

    @property
    def read_soon(self) -> bool:
        """True if the decode rank polls the words, so that it needs no notification."""
        return not (self.board.closed or self.board.asleep)

    def cancel(self) -> None:
        """Frees the slot; the number must not have been queued."""
        self.board.cancel(self.slot)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(Written)
