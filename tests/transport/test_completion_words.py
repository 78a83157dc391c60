"""Boards of completion words: reports, free slots, and boards that cannot be mapped."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from disagg.core.errors import ProtocolError, TransportError
from disagg.core.types import Segment, Span
from transport.completion_notifications import Written
from transport.completion_words import SLOTS, Board, OpenBoard, Reported, WordReport
from transport.handles import BoardHandle


def written(index: int) -> Written:
    return Written(Segment(index, 0, 0, Span(0, 2), Span(0, 4), Span(7, 9), 640), 0, again=False)


@pytest.fixture
def board() -> Iterator[Board]:
    board = Board()
    yield board
    board.close()


@pytest.fixture
def peer(board: Board) -> OpenBoard:
    return OpenBoard(board.handle)


def complete(report: WordReport | None) -> None:
    """The device stores the number of a report."""
    assert report is not None
    report.board.words[report.slot] = report.number


def test_a_report_is_read_once_and_only_when_its_word_is_stored(board: Board, peer: OpenBoard) -> None:
    first, second = peer.post(11, written(1)), peer.post(12, written(2))
    assert first is not None
    assert not first.query()
    assert not board.changed
    assert list(board.take()) == []
    complete(second)  # in any order
    assert board.changed
    assert [(one.tag, one.read()) for one in board.take()] == [(12, written(2))]
    complete(first)
    assert first.query()
    assert [(one.tag, one.read()) for one in board.take()] == [(11, written(1))]
    assert not board.changed
    assert list(board.take()) == []


def test_a_slot_is_free_again_when_its_report_was_read(board: Board, peer: OpenBoard) -> None:
    for turn in range(3):
        reports = [peer.post(tag, written(tag)) for tag in range(SLOTS)]
        assert peer.post(0, written(0)) is None, "every slot is in use"
        for report in reports:
            complete(report)
        assert peer.post(0, written(0)) is None, f"no report was read in turn {turn}"
        assert [one.tag for one in board.take()] == list(range(SLOTS))


def test_a_report_stays_complete_when_its_slot_has_a_new_one(board: Board, peer: OpenBoard) -> None:
    """The prefill rank may look only after it has posted reports into all slots again."""
    first = [peer.post(tag, written(tag)) for tag in range(SLOTS)]
    for report in first:
        complete(report)
    assert len(list(board.take())) == SLOTS
    second = peer.post(0, written(0))
    assert second is not None
    assert not second.query()
    for _ in range(2):
        assert all(report is not None and report.query() for report in first)
        complete(second)
    assert second.query()


def test_a_cancelled_report_leaves_its_slot_free(board: Board, peer: OpenBoard) -> None:
    report = peer.post(1, written(1))
    assert report is not None
    report.cancel()
    assert not board.changed
    reports = [peer.post(tag, written(tag)) for tag in range(SLOTS)]
    for one in reports:
        complete(one)
    assert sorted(one.tag for one in board.take()) == list(range(SLOTS))


def test_a_rank_that_polls_no_words_needs_notifications(board: Board, peer: OpenBoard) -> None:
    report = peer.post(1, written(1))
    assert report is not None
    assert report.read_soon
    board.sleep()
    assert not report.read_soon
    board.wake()
    assert report.read_soon
    peer.closed = True
    assert not report.read_soon
    assert peer.post(1, written(1)) is None


def test_the_begin_of_a_write_is_announced(board: Board, peer: OpenBoard) -> None:
    assert not board.begun(5.0, 0.5)
    peer.begin(5.0)
    assert board.begun(5.25, 0.5)
    assert board.begun(4.75, 0.5), "the peer's loop is ahead"
    assert not board.begun(5.5, 0.5)
    assert not board.begun(4.5, 0.5), "no begin, but a clock of another time namespace"


def test_bytes_that_are_no_record_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError, match="cannot be decoded"):
        Reported(1, b"\xff").read()


def test_memory_that_is_not_the_board_is_not_mapped(board: Board) -> None:
    handle = board.handle
    with Path(__file__).open("rb") as other, closing(Board()) as another:
        for wrong, why in [
            (msgspec.structs.replace(handle, host="elsewhere"), "another host"),
            (msgspec.structs.replace(handle, file=other.fileno()), "not a board"),
            (msgspec.structs.replace(handle, file=another.handle.file), "another board"),
            (BoardHandle(handle.host, handle.process, 1 << 20, handle.id), "cannot be mapped"),
        ]:
            with pytest.raises(TransportError, match=why):
                OpenBoard(wrong)


def test_a_processor_that_reorders_loads_has_no_board(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(TransportError, match="reorders loads"):
        Board()


def test_only_the_user_of_the_rank_can_open_a_board(board: Board) -> None:
    assert os.fstat(board.handle.file).st_mode & 0o777 == 0o600


def test_a_closed_board_has_no_file_and_its_mapping_stays(board: Board, peer: OpenBoard) -> None:
    file = board.handle.file
    report = peer.post(1, written(1))
    board.close()
    board.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file)
    complete(report)  # a store that was queued before has no effect on any other memory
