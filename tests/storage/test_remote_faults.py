"""Faults of a storage server: hangs, disconnects, wrong replies, no memory; every page is a miss, nothing raises."""

from __future__ import annotations

import importlib
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from faulty_disk import ManualClock
from redis_servers import FakeServer, RealServer, fake_server, real_server
from storage_pages import AT_ONCE_S, TIMEOUT_S, content, exists, get, key, memory, put

from disagg.core.errors import ConfigError
from disagg.storage.breaker import PauseSettings
from disagg.storage.remote import RemoteSettings, RemoteStorage

PAUSE = PauseSettings(faults=3, first_s=1.0, longest_s=4.0)
SHORT_S = 0.05


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def storage(server: FakeServer, clock: ManualClock) -> Iterator[RemoteStorage]:
    storage = RemoteStorage(
        RemoteSettings(server.url, threads=2, server_timeout_s=TIMEOUT_S, pause=PAUSE), clock
    )
    yield storage
    server.woken.set()
    storage.close()


def test_a_hanging_server_is_late_and_touches_no_memory(server: FakeServer, storage: RemoteStorage) -> None:
    put(storage, range(4))
    server.hangs.set()
    into = [memory(5000) for _ in range(4)]
    started_s = time.monotonic()
    assert storage.get([key(name) for name in range(4)], into, SHORT_S) == [False] * 4
    assert time.monotonic() - started_s < AT_ONCE_S
    for page in into:
        page[:] = b"\xcd" * 5000
    server.hangs.clear()
    server.woken.set()  # the late replies come
    assert get(storage, range(4)) == [True] * 4
    assert all(page == b"\xcd" * 5000 for page in into)
    assert storage.statistics().late == 4
    storage.check()


def test_a_hanging_server_pauses_the_storage_and_comes_back(
    server: FakeServer, storage: RemoteStorage, clock: ManualClock
) -> None:
    put(storage, range(4))
    server.hangs.set()
    with structlog.testing.capture_logs() as lines:
        for _ in range(3):
            assert get(storage, [0], timeout_s=SHORT_S) == [False]
        started_s = time.monotonic()
        for _ in range(50):
            assert get(storage, [0], timeout_s=60) == [False]
            assert exists(storage, [0]) == [False]
        assert time.monotonic() - started_s < 30
    assert [line["event"] for line in lines] == ["storage_paused"]
    found = storage.statistics()
    assert (found.pauses, found.skipped, found.paused) == (1, 100, True)
    server.hangs.clear()
    server.woken.set()
    clock.now_s += 1.0
    assert get(storage, range(4)) == [True] * 4
    assert not storage.statistics().paused


def test_a_late_write_stores_the_page_as_it_was(server: FakeServer, storage: RemoteStorage) -> None:
    page = bytearray(content("a", 5000))
    server.hangs.set()
    assert storage.put([key("a")], [memoryview(page)], SHORT_S) == [False]
    page[:] = bytes(5000)
    server.hangs.clear()
    server.woken.set()
    assert put(storage, ["b"]) == [True]
    assert get(storage, ["b"]) == [True]
    get(storage, ["a"])  # a hit has the right content
    assert storage.statistics().corrupt == 0


@pytest.mark.parametrize("cut_at", [0, 1, 8, 100, 3000])
def test_a_disconnect_within_a_reply_is_a_miss(
    server: FakeServer, storage: RemoteStorage, cut_at: int
) -> None:
    put(storage, ["a"])
    server.cut_at = cut_at
    assert get(storage, ["a"]) == [False]
    assert storage.statistics().errors == 1
    assert get(storage, ["a"]) == [True]  # on a new connection


def test_idle_connections_that_the_server_closed_cost_few_misses(
    server: FakeServer, storage: RemoteStorage
) -> None:
    put(storage, range(4))
    get(storage, range(4))
    server.disconnect_all()
    rounds = [get(storage, range(4)) for _ in range(4)]
    assert rounds[-1] == [True] * 4
    storage.check()


@pytest.mark.parametrize(
    "garbage",
    [
        b"HTTP/1.1 400 Bad Request\r\n\r\n",
        b"*1\r\n$abc\r\nxyz\r\n",
        b"*2\r\n$-1\r\n$-1\r\n",
        b"*0\r\n",
        b"+OK\r\n",
        b":5\r\n",
        b"-ERR no\r\n",
        b"$3\r\nabc\r\n",
        b"*1\r\n:7\r\n",
        b"*-1\r\n",
    ],
)
def test_wrong_replies_are_misses(server: FakeServer, storage: RemoteStorage, garbage: bytes) -> None:
    put(storage, ["a"])
    server.garbage = garbage
    assert get(storage, ["a"]) == [False]
    for _ in range(4):  # the connection may have to be replaced
        hit = get(storage, ["a"])
    assert hit == [True]
    storage.check()


@pytest.mark.parametrize("damage", ["flip header", "flip content", "cut", "empty", "of another key"])
def test_a_wrong_value_is_dropped(server: FakeServer, storage: RemoteStorage, damage: str) -> None:
    put(storage, ["a", "b"])
    name = b"disagg:" + key("a")
    value = bytearray(server.values[name])
    match damage:
        case "flip header":
            value[30] ^= 1
        case "flip content":
            value[3000] ^= 1
        case "cut":
            del value[4000:]
        case "empty":
            value.clear()
        case "of another key":
            value = bytearray(server.values[b"disagg:" + key("b")])
    server.values[name] = bytes(value)
    assert get(storage, ["a", "b"]) == [False, True]
    assert storage.statistics().corrupt == 1
    assert name not in server.values
    assert put(storage, ["a"]) == [True]
    assert get(storage, ["a"]) == [True]


def test_a_server_without_memory_pauses_writes_only(
    server: FakeServer, storage: RemoteStorage, clock: ManualClock
) -> None:
    put(storage, ["a"])
    server.error = b"OOM command not allowed when used memory > 'maxmemory'."
    assert put(storage, ["b"]) == [False]
    commands = len(server.commands)
    assert put(storage, ["c"]) == [False]
    assert len(server.commands) == commands
    assert get(storage, ["a"]) == [True]
    found = storage.statistics()
    assert (found.full, found.errors, found.pauses) == (1, 0, 1)
    server.error = None
    clock.now_s += 1.0
    assert put(storage, ["c"]) == [True]


def test_refused_writes_pause_writes(server: FakeServer, storage: RemoteStorage) -> None:
    server.error = b"READONLY You can't write against a read only replica."
    for name in range(5):
        assert put(storage, [name]) == [False]
    found = storage.statistics()
    assert (found.errors, found.pauses, found.skipped) == (3, 1, 2)


def test_a_server_that_is_not_there(clock: ManualClock, tmp_path: Path) -> None:
    storage = RemoteStorage(RemoteSettings(f"unix://{tmp_path}/none", threads=1, pause=PAUSE), clock)
    for _ in range(5):
        assert get(storage, ["a"]) == [False]
        assert put(storage, ["a"]) == [False]
    found = storage.statistics()
    assert (found.errors, found.pauses, found.paused) == (6, 2, True)
    storage.check()
    storage.close()


def test_close_does_not_wait_for_a_hanging_server(server: FakeServer, storage: RemoteStorage) -> None:
    server.hangs.set()
    get(storage, ["a"], timeout_s=SHORT_S)
    started_s = time.monotonic()
    storage.close()
    assert time.monotonic() - started_s < AT_ONCE_S


def test_large_batches_are_sent_in_parts(server: FakeServer, storage: RemoteStorage) -> None:
    names = list(range(40))
    assert put(storage, names, 600_000) == [True] * 40
    assert get(storage, names, 600_000) == [True] * 40
    assert server.commands.count(b"MGET") >= 40 * 600_000 // (1 << 20)
    assert server.connections <= 4


def test_a_real_server_is_restarted(clock: ManualClock) -> None:
    with (
        tempfile.TemporaryDirectory(prefix="disagg-redis-", dir="/tmp") as folder,
        real_server(Path(folder)) as server,
    ):
        storage = RemoteStorage(RemoteSettings(server.url, threads=1, pause=PAUSE), clock)
        assert put(storage, range(3)) == [True] * 3
        server.stop()
        for _ in range(4):
            assert get(storage, range(3)) == [False] * 3
        assert storage.statistics().paused
        server.start()
        clock.now_s += 1.0
        get(storage, range(3))  # the server has lost its pages
        assert not storage.statistics().paused
        assert put(storage, range(3)) == [True] * 3
        assert get(storage, range(3)) == [True] * 3
        storage.close()


def test_a_real_server_evicts(clock: ManualClock) -> None:
    limit = ("--maxmemory", "16mb", "--maxmemory-policy", "allkeys-lru")
    with (
        tempfile.TemporaryDirectory(prefix="disagg-redis-", dir="/tmp") as folder,
        real_server(Path(folder), *limit) as server,
    ):
        storage = RemoteStorage(RemoteSettings(server.url, threads=2, pause=PAUSE), clock)
        for first in range(0, 320, 32):
            assert put(storage, range(first, first + 32), 100_000) == [True] * 32
        assert 0 < get(storage, range(320), 100_000).count(True) < 200
        storage.close()


def test_a_real_server_without_eviction_is_full(clock: ManualClock) -> None:
    limit = ("--maxmemory", "8mb", "--maxmemory-policy", "noeviction")
    with (
        tempfile.TemporaryDirectory(prefix="disagg-redis-", dir="/tmp") as folder,
        real_server(Path(folder), *limit) as server,
    ):
        storage = RemoteStorage(RemoteSettings(server.url, threads=2, pause=PAUSE), clock)
        stored = [put(storage, [name], 500_000) for name in range(40)]
        assert stored[0] == [True]
        assert stored[-1] == [False]
        found = storage.statistics()
        assert found.full == 1
        assert found.errors == 0
        assert get(storage, [0], 500_000) == [True]
        storage.close()


def test_pages_expire(redis_server: RealServer) -> None:
    storage = RemoteStorage(RemoteSettings(redis_server.url, threads=1, expire_s=100, prefix=b"expiring:"))
    put(storage, ["a"])
    put(storage, ["a"])
    import redis

    with redis.Redis.from_url(redis_server.url) as client:
        assert 0 < client.ttl(b"expiring:" + key("a")) <= 100
    storage.close()


def test_errors_of_settings_show_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="malformed") as caught:
        RemoteStorage(RemoteSettings("http://user:secret@host"))
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError, match="a thread or more"):
        RemoteSettings("redis://host", threads=0)


def test_without_the_client_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ConfigError, match=r"pip install 'disagg\[redis\]'"):
        RemoteStorage(RemoteSettings("redis://host"))
    importlib.import_module("disagg.storage.remote")


def test_logs_show_no_password(clock: ManualClock) -> None:
    with fake_server() as server:
        url = f"redis://user:secret@127.0.0.1:{server.port}/0"
        storage = RemoteStorage(RemoteSettings(url, threads=1, pause=PAUSE), clock)
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                assert get(storage, ["a"]) == [False]  # the fake server knows no AUTH
        storage.close()
    assert [line["storage"] for line in lines] == [f"127.0.0.1:{server.port} reads"]
    assert "secret" not in str(lines)
