"""Boards of completion words between processes: reports, and the sudden death of either side."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import pytest
from forked_processes import ForkedContext

from disagg.core.errors import TransportError
from disagg.core.types import Segment, Span
from transport.completion_notifications import Written
from transport.completion_words import Board, OpenBoard

WRITTEN = Written(Segment(5, 0, 0, Span(0, 2), Span(0, 4), Span(7, 9), 640), 0, again=False)


def report(pipe: Connection) -> None:
    """A prefill rank: reports two writes, completes the second one, and stays until it is killed."""
    board = OpenBoard(pipe.recv())
    reports = [board.post(tag, WRITTEN) for tag in (1, 2)]
    assert reports[1] is not None
    board.words[reports[1].slot] = reports[1].number
    pipe.send("reported")
    pipe.recv()


def own(pipe: Connection) -> None:
    """A decode rank: offers a board, reads one report, and stays until it is killed."""
    board = Board()
    pipe.send(board.handle)
    taken: list[int] = []
    while not taken:
        taken += [one.tag for one in board.take()]
        time.sleep(1e-3)
    pipe.send(taken)
    pipe.recv()


@contextmanager
def child(target: Callable[[Connection], None]) -> Iterator[tuple[Connection, BaseProcess]]:
    context = ForkedContext()
    pipe, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs,), daemon=True)
    process.start()
    with pipe, theirs:
        yield pipe, process
    process.kill()
    process.join()


def test_reports_of_another_process_outlive_it() -> None:
    """A report that it had not completed never comes."""
    with closing(Board()) as board, child(report) as (pipe, process):
        pipe.send(board.handle)
        assert pipe.recv() == "reported"
        process.kill()
        process.join()
        assert [(one.tag, one.read()) for one in board.take()] == [(2, WRITTEN)]
        assert not board.changed


def test_a_board_outlives_its_owner_in_the_ranks_that_have_mapped_it() -> None:
    with child(own) as (pipe, process):
        handle = pipe.recv()
        board = OpenBoard(handle)
        first = board.post(3, WRITTEN)
        assert first is not None
        board.words[first.slot] = first.number
        assert pipe.recv() == [3]
        process.kill()
        process.join()
        second = board.post(4, WRITTEN)
        assert second is not None
        board.words[second.slot] = second.number  # the device stores late
        assert second.query()
        with pytest.raises(TransportError, match="cannot be mapped"):
            OpenBoard(handle)
