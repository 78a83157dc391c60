"""Numbers that a device queue stores into words of host memory, after the work that was queued before."""

from __future__ import annotations

import gc

import pytest
import torch

from disagg.core.errors import TransportError
from disagg.node.device import DeviceQueue
from disagg.node.device_words import DeviceWords
from transport.completion_words import SLOTS, Board, OpenBoard

CPU = torch.device("cpu")


def test_a_queue_of_a_cpu_stores_at_once() -> None:
    board, queue = Board(), DeviceQueue(CPU)
    peer = OpenBoard(board.handle)
    words = DeviceWords(peer.words, CPU)
    queue.store(words, 3, 7)
    assert peer.words.tolist() == [0, 0, 0, 7] + [0] * (SLOTS - 3)
    queue.try_store(words, SLOTS)
    assert peer.words[SLOTS] == 1


def test_words_that_do_not_change_are_not_used() -> None:
    class Lost(list[int]):
        def __setitem__(self, *arguments: object) -> None: ...

    words = DeviceWords(Lost([0]), CPU)
    with pytest.raises(TransportError, match="did not store"):
        DeviceQueue(CPU).try_store(words, 0)


@pytest.mark.gpu
def test_a_gpu_stores_after_earlier_work_of_its_queue() -> None:
    """The first store waits for a kernel of about a second; the memory can be registered again and again."""
    device = torch.device("cuda", 0)
    queue, board = DeviceQueue(device), Board()
    peer = OpenBoard(board.handle)
    for number in range(1, 4):
        words = DeviceWords(peer.words, device)
        queue.try_store(words, SLOTS)
        with queue.use():
            torch.cuda._sleep(1_000_000_000)
            queue.store(words, number, number)
        assert peer.words[number] == 0, "the kernel still runs"
        event = queue.record_event()
        event.synchronize()
        assert peer.words[:SLOTS].tolist() == [at if at <= number else 0 for at in range(SLOTS)]
        del words
        gc.collect()
