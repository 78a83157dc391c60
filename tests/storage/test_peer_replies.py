"""Replies of peers whose buffers the exchange lends: which thread reads them, and when they are released."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import pytest
from page_peers import NoPeers
from storage_pages import TIMEOUT_S, content, key, memory

from disagg.core.item_events import ID_BYTES, ItemPiece
from disagg.storage.contract import ITEM_BYTES
from disagg.storage.peer_index import PeerIndex
from disagg.storage.peers import Answer, PeerStorage, ReadAnswer
from disagg.storage.record import RecordHeader

NBYTES = 5000


class LentRecords:
    """A reply with the page of each key; notes the thread of each access."""

    def __init__(self, keys: Sequence[bytes], pages: Sequence[bytes]) -> None:
        records = [
            RecordHeader.of(k, memoryview(page)).packed() + page for k, page in zip(keys, pages, strict=True)
        ]
        self._content = memoryview(b"\1" * len(keys) + b"".join(records))
        self.readers: list[int] = []
        self.released = 0

    @property
    def content(self) -> memoryview:
        assert not self.released
        self.readers.append(threading.get_ident())
        return self._content

    def release(self) -> None:
        self.released += 1


class LendingPeer(NoPeers):
    """A peer with all pages, of which each reply has two. Answers reads at once, or on other threads after `go`."""

    def __init__(self) -> None:
        self.peers = ("peer",)
        self.most_keys = 2
        self.at_once, self.go = False, threading.Event()
        self.lent: list[LentRecords] = []
        self.threads: list[threading.Thread] = []

    def ask(self, peer: str, keys: Sequence[bytes], answer: Answer) -> None:
        answer(memoryview(b"\1" * len(keys)))

    def read(self, peer: str, keys: Sequence[bytes], answer: ReadAnswer) -> None:
        self.lent.append(reply := LentRecords(keys, [content(k, NBYTES) for k in keys]))

        def run() -> None:
            assert self.go.wait(TIMEOUT_S)
            answer(reply)

        if self.at_once:
            answer(reply)
            return
        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def join(self) -> None:
        self.go.set()
        for thread in self.threads:
            thread.join(TIMEOUT_S)


@pytest.fixture
def peer() -> Iterator[LendingPeer]:
    peer = LendingPeer()
    yield peer
    peer.join()


def storage_of(peer: LendingPeer) -> PeerStorage:
    index, page = PeerIndex(), key(0)
    index.apply(
        "peer", ItemPiece(5, 0, 0, None, b"".join(key(i)[:ID_BYTES] for i in range(4)), page[ITEM_BYTES:])
    )
    return PeerStorage(peer, index)


def keys() -> list[bytes]:
    return [key(i)[:ITEM_BYTES] + key(0)[ITEM_BYTES:] for i in range(4)]


def test_the_calling_thread_reads_the_replies(peer: LendingPeer) -> None:
    """Meanwhile the thread of the exchange moves further replies."""
    into = [memory(NBYTES) for _ in keys()]
    peer.go.set()
    assert storage_of(peer).get(keys(), into, TIMEOUT_S) == [True] * 4
    assert [bytes(page) for page in into] == [content(k, NBYTES) for k in keys()]
    assert {reader for reply in peer.lent for reader in reply.readers} == {threading.get_ident()}
    assert [reply.released for reply in peer.lent] == [1, 1]


def test_a_reply_after_the_time_limit_is_released_and_changes_no_memory(peer: LendingPeer) -> None:
    storage, into = storage_of(peer), [memory(NBYTES) for _ in keys()]
    assert storage.get(keys(), into, 0.01) == [False] * 4
    assert storage.statistics().late == 4
    peer.join()
    assert [reply.released for reply in peer.lent] == [1, 1]
    assert all(page == b"\xab" * NBYTES for page in into)
    storage.check()


def test_no_page_is_copied_after_the_time_limit(peer: LendingPeer) -> None:
    """Also not a page of a reply that arrived in time."""
    storage, into = storage_of(peer), [memory(NBYTES) for _ in keys()]
    peer.at_once = True
    assert storage.get(keys(), into, 0.0) == [False] * 4
    assert storage.statistics().late == 4
    assert [reply.released for reply in peer.lent] == [1, 1]
    assert all(page == b"\xab" * NBYTES for page in into)


def test_replies_are_released_after_a_bug_of_the_caller(
    peer: LendingPeer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> bool:
        peer.join()  # all replies have arrived
        raise RuntimeError("a bug")

    peer.most_keys = 1
    storage = storage_of(peer)
    monkeypatch.setattr(storage, "_unpack", fail)
    peer.go.set()
    with pytest.raises(RuntimeError, match="a bug"):
        storage.get(keys(), [memory(NBYTES) for _ in keys()], TIMEOUT_S)
    assert [reply.released for reply in peer.lent] == [1] * 4
