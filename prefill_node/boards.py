"""Boards of decode ranks, in which this rank's device reports its direct writes (`transport.completion_words`)."""

from __future__ import annotations

import structlog

from disagg.core.errors import TransportError
from disagg.node.device import DeviceQueue
from disagg.node.device_words import DeviceWords
from transport.completion_notifications import Written
from transport.completion_words import SLOTS, OpenBoard, WordReport
from transport.handles import BoardHandle

log = structlog.get_logger(__name__)


class PeerBoard:
    """The board of one decode rank, which this rank's copy queue can store into. Owned by the transfer thread.

    A transfer that writes keeps a reference to the board, so the words stay mapped until its last store has ended.
    """

    def __init__(self, handle: BoardHandle, queue: DeviceQueue) -> None:
        """Maps the board, and stores a number for trial. Raises `TransportError`."""
        self.board = OpenBoard(handle)
        self._queue, self._words = queue, DeviceWords(self.board.words, queue.device)
        queue.try_store(self._words, SLOTS)

    def post(self, tag: int, written: Written) -> WordReport | None:
        """Enters the report of a write that is about to be launched; None if the write needs a notification."""
        return self.board.post(tag, written)

    def store(self, report: WordReport) -> bool:
        """Queues the store that completes the report, after the write; returns False if this is not possible.

        The report is then cancelled, and no further report is posted.
        """
        try:
            self._queue.store(self._words, report.slot, report.number)
        except TransportError as exc:
            log.warning("completion_words_failed", error=str(exc), how="each write has a notification")
            report.cancel()
            self.board.closed = True
            return False
        return True


class PeerBoards:
    """Boards of the connected decode ranks. Owned by the transfer thread."""

    def __init__(self, queue: DeviceQueue) -> None:
        self._queue = queue
        self._open: dict[str, PeerBoard] = {}
        self._ended: set[bytes] = set()
        """Boards of peers that were lost. Stores of launched writes may still be under way."""

    def open(self, peer: str, handle: BoardHandle) -> PeerBoard | None:
        """Returns the peer's board; None if it cannot be used, so that each write has a notification."""
        known = self._open.get(peer)
        if known is not None and known.board.id == handle.id:
            return known
        self.forget(peer)
        try:
            if handle.id in self._ended:
                raise TransportError("the offer is older than the loss of the peer")
            self._open[peer] = PeerBoard(handle, self._queue)
        except TransportError as exc:
            log.info("no_completion_words", peer=peer, why=str(exc), how="each write has a notification")
        return self._open.get(peer)

    def forget(self, peer: str) -> None:
        """Ends the use of a lost peer's board."""
        known = self._open.pop(peer, None)
        if known is not None:
            known.board.closed = True
            self._ended.add(known.board.id)
