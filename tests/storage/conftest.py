"""The backends on which every check of the storage contract runs."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from page_peers import NoPeers, WrittenAtAPeer, page_cluster
from redis_servers import RealServer, fake_server, real_server

from disagg.storage.contract import PageStorage
from disagg.storage.files import FileSettings, FileStorage
from disagg.storage.layered import LayeredStorage
from disagg.storage.memory import MemoryStorage
from disagg.storage.peer_index import PeerIndex
from disagg.storage.peers import PeerStorage
from disagg.storage.remote import RemoteSettings, RemoteStorage

BACKENDS = ["memory", "files", "files-buffered", "redis", "fake-redis", "peers", "layered-memory"]


@pytest.fixture(scope="session")
def redis_server() -> Iterator[RealServer]:
    """One real server for all tests that only need one; the path of its socket is short."""
    folder = Path(tempfile.mkdtemp(prefix="disagg-redis-", dir="/tmp"))
    try:
        with real_server(folder) as server:
            yield server
    finally:
        shutil.rmtree(folder)


@pytest.fixture(params=BACKENDS)
def make_storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], PageStorage]]:
    """Opens storages of one backend on the same pages, except in memory; closes them afterwards."""
    with ExitStack() as opened:
        backend, url, prefix = request.param, "", str(tmp_path).encode()
        if backend == "redis":
            url = request.getfixturevalue("redis_server").url
        if backend == "fake-redis":
            url = opened.enter_context(fake_server()).url
        cluster = opened.enter_context(page_cluster()) if backend == "peers" else None

        def make() -> PageStorage:
            storage: PageStorage
            if backend == "memory":
                storage = MemoryStorage(8 << 20)
            elif backend == "layered-memory":
                storage = LayeredStorage(PeerStorage(NoPeers(), PeerIndex()), MemoryStorage(8 << 20))
            elif cluster is not None:
                storage = WrittenAtAPeer(cluster)
            elif url:
                storage = RemoteStorage(RemoteSettings(url, threads=2, prefix=prefix))
            else:
                settings = FileSettings(
                    tmp_path, 8 << 20, 1 << 20, threads=2, direct=backend == "files", refresh_s=0
                )
                storage = FileStorage(settings)
            opened.callback(storage.close)
            return storage

        yield make


@pytest.fixture
def storage(make_storage: Callable[[], PageStorage]) -> PageStorage:
    """One open storage."""
    return make_storage()
