"""Faults of a group's storage: each is logged and counted, and no request fails or has a wrong token."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog
from conditions import PATIENCE_S, until
from faulty_disk import FaultyDisk
from local_groups import (
    Checkpoints,
    LocalGroups,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)
from redis_servers import FakeServer, fake_server
from storing_groups import GREEDY, PROMPTS, TOKENS, serve, tier_of, wait_until_written, with_storage

from disagg.core.config.read import Config
from disagg.core.status import RankStatus
from disagg.node import storage_controller
from disagg.storage import files, remote
from disagg.storage import open as opening
from disagg.storage.breaker import PauseSettings

PAGES = 6 + 5
"""Full pages of `PROMPTS`."""
OTHERS = random_prompts(70, 40, seed=12)
"""Prompts that nobody has stored, of 4 + 2 full pages."""
SHORT_PAUSE = PauseSettings(faults=1, first_s=0.02, longest_s=0.02)
CALL_LIMIT_S = 0.1
"""Of calls to a storage that hangs."""


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyDisk]:
    """The disk of all file storages; pauses are short."""
    disk = FaultyDisk()

    def storage(settings: files.FileSettings) -> files.FileStorage:
        return files.FileStorage(replace(settings, refresh_s=0.02, pause=SHORT_PAUSE), disk)

    monkeypatch.setattr(opening, "FileStorage", storage)
    yield disk
    disk.reads_go.set()
    disk.writes_go.set()


@pytest.fixture(scope="module")
def stored(checkpoints: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders with the pages of `PROMPTS`: of a group that has stopped, and as if its process had been killed."""
    stopped = tmp_path_factory.mktemp("stopped")
    killed = stopped.with_name("killed")
    with local_groups(config_of(stopped), checkpoints.source()) as groups:
        serve(groups, PROMPTS)
        wait_until_written(ranks_of(groups), PAGES)
        shutil.copytree(stopped, killed)
    return stopped, killed


@pytest.fixture
def folder(stored: tuple[Path, Path], tmp_path: Path) -> Path:
    return Path(shutil.copytree(stored[0], tmp_path / "pages"))


@pytest.fixture
def server(checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    """A server with the pages of `PROMPTS`; pauses are short."""
    monkeypatch.setattr(opening, "RemoteSettings", partial(remote.RemoteSettings, pause=SHORT_PAUSE))
    with fake_server() as server:
        with local_groups(config_of(server.url), checkpoints.source()) as groups:
            serve(groups, PROMPTS)
            wait_until_written(ranks_of(groups), PAGES)
        yield server
        server.woken.set()


def config_of(where: Path | str) -> Config:
    """A split system with a folder, a colocated group with a server: both read and write in the same way."""
    if isinstance(where, Path):
        return with_storage(where, small_config(1, 1), "prefill")
    return with_storage(where, colocated_config(), "colocated")


def ranks_of(groups: LocalGroups) -> list[Any]:
    """Ranks of the first group with a storage."""
    return next(ranks for ranks in groups.groups.values() if ranks[0].group_config.storage)


def status_of(groups: LocalGroups) -> RankStatus:
    """What the metrics show of the first rank with a storage."""
    rank = ranks_of(groups)[0]
    rank.report()
    status: RankStatus = rank.leader.status().ranks[0]
    return status


def exact(groups: LocalGroups, checkpoints: Checkpoints, prompts: list[list[int]]) -> None:
    source = checkpoints.source()
    assert serve(groups, prompts) == [checkpoints.greedy(source, prompt, TOKENS) for prompt in prompts]


def require_logged(lines: list[Any], event: str) -> None:
    assert event in [line["event"] for line in lines]


def slowly(fault: Callable[..., None]) -> Any:
    return pytest.param(fault, marks=pytest.mark.slow)


def full(disk: FaultyDisk) -> None:
    disk.write_error = errno.ENOSPC


def broken(disk: FaultyDisk) -> None:
    disk.read_error = disk.write_error = errno.EIO


def torn(disk: FaultyDisk) -> None:
    """Writes fail, and leave a part of their record."""
    disk.write_error, disk.torn_bytes = errno.EIO, 2048


def hung(disk: FaultyDisk) -> None:
    disk.reads_go.clear()
    disk.writes_go.clear()


def works(disk: FaultyDisk) -> None:
    disk.read_error = disk.write_error = 0
    disk.reads_go.set()
    disk.writes_go.set()


@pytest.mark.parametrize("fault", [slowly(full), slowly(broken), torn, hung])
def test_a_disk_with_a_fault(
    fault: Callable[[FaultyDisk], None],
    folder: Path,
    disk: FaultyDisk,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The group starts with the fault, and stores pages after it. A restarted group serves no torn page."""
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", CALL_LIMIT_S if fault is hung else PATIENCE_S)
    with local_groups(config_of(folder), checkpoints.source()) as groups:
        fault(disk)
        with structlog.testing.capture_logs() as lines:
            exact(groups, checkpoints, PROMPTS + OTHERS)
            wait_for_faults(groups)
        require_logged(lines, "storage_paused")
        assert tier_of(ranks_of(groups)).fetched_pages == (PAGES if fault in (full, torn) else 0)
        works(disk)
        monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", PATIENCE_S)
        wait_for_writes(groups, checkpoints)
    with local_groups(config_of(folder), checkpoints.source()) as groups:
        exact(groups, checkpoints, PROMPTS + OTHERS)
        assert tier_of(ranks_of(groups)).fetched_pages == PAGES + 4 + 2


def wait_for_faults(groups: LocalGroups) -> None:
    """Writes end after the answers."""
    until(lambda: status_of(groups).storage_faults_total > 0 and not tier_of(ranks_of(groups)).writing_pages)


def wait_for_writes(groups: LocalGroups, checkpoints: Checkpoints) -> None:
    """Soon all pages are stored: the next use of a prompt writes what failed."""

    def stored() -> bool:
        exact(groups, checkpoints, PROMPTS + OTHERS)
        return (
            tier_of(ranks_of(groups)).written_pages + tier_of(ranks_of(groups)).fetched_pages >= PAGES + 4 + 2
        )

    until(stored)


def test_a_folder_that_is_removed(folder: Path, disk: FaultyDisk, checkpoints: Checkpoints) -> None:
    with local_groups(config_of(folder), checkpoints.source()) as groups:
        shutil.rmtree(folder)
        with structlog.testing.capture_logs() as lines:
            exact(groups, checkpoints, PROMPTS + OTHERS)
            wait_for_faults(groups)
        require_logged(lines, "storage_folder_unreadable")
        assert tier_of(ranks_of(groups)).fetched_pages == 0


def test_a_process_killed_in_a_write(
    stored: tuple[Path, Path], tmp_path: Path, disk: FaultyDisk, checkpoints: Checkpoints
) -> None:
    """Every third record is torn in its middle; the segments have no side index. The other pages are found."""
    folder = Path(shutil.copytree(stored[1], tmp_path / "pages"))
    torn_records = 0
    for path in folder.glob("*.pages"):
        data = bytearray(path.read_bytes())
        for number, start in enumerate(range(0, len(data), 4096)):
            if any(data[start : start + 80]) and number % 12 == 11:
                data[start + 2048 : start + 4096] = bytes(2048)
                torn_records += 1
        path.write_bytes(data)
    assert torn_records
    with local_groups(config_of(folder), checkpoints.source()) as groups:
        with structlog.testing.capture_logs() as lines:
            exact(groups, checkpoints, PROMPTS)
        require_logged(lines, "storage_page_corrupt")
        assert 0 < tier_of(ranks_of(groups)).fetched_pages < PAGES
        assert status_of(groups).storage_corrupt_total > 0


def test_two_groups_share_a_folder(folder: Path, disk: FaultyDisk, checkpoints: Checkpoints) -> None:
    """Both read and write at the same time; one group reads what the other one has written meanwhile."""
    config = with_storage(folder, small_config(1, 1, groups=(2, 1)), "prefill")
    more = random_prompts(*[90] * 6, seed=13)
    with local_groups(config, checkpoints.source()) as groups:
        answers = groups.answers([*PROMPTS, *more], GREEDY)
        expected = [checkpoints.greedy(checkpoints.source(), one, TOKENS) for one in [*PROMPTS, *more]]
        assert [one.tokens for one in answers] == expected
        both = [tier_of(groups.groups[name]) for name in ("prefill", "prefill-2")]
        assert all(tier.fetched_pages or tier.written_pages for tier in both)
        until(lambda: not any(tier_of(groups.groups[one]).writing_pages for one in ("prefill", "prefill-2")))
    with local_groups(config_of(folder), checkpoints.source()) as groups:
        exact(groups, checkpoints, [*PROMPTS, *more])
        assert tier_of(ranks_of(groups)).fetched_pages == PAGES + 6 * 5


def hangs(server: FakeServer) -> None:
    server.hangs.set()


def leaves(server: FakeServer) -> None:
    server.close()


def has_no_memory(server: FakeServer) -> None:
    server.error = b"OOM command not allowed when used memory > 'maxmemory'."


def flips(server: FakeServer) -> None:
    server.values = {
        key: value[:-5] + bytes([value[-5] ^ 1]) + value[-4:] for key, value in server.values.items()
    }


def cuts(server: FakeServer) -> None:
    server.values = {key: value[: len(value) // 2] for key, value in server.values.items()}


SERVER_FAULTS: Mapping[Callable[[FakeServer], None], str] = {
    hangs: "storage_paused",
    leaves: "storage_paused",
    has_no_memory: "storage_paused",
    flips: "storage_page_corrupt",
    cuts: "storage_page_corrupt",
}


@pytest.mark.parametrize("fault", [hangs, slowly(leaves), slowly(has_no_memory), flips, slowly(cuts)])
def test_a_server_with_a_fault(
    fault: Callable[[FakeServer], None],
    server: FakeServer,
    checkpoints: Checkpoints,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(storage_controller, "CALL_LIMIT_S", CALL_LIMIT_S if fault is hangs else PATIENCE_S)
    with local_groups(config_of(server.url), checkpoints.source()) as groups:
        fault(server)
        with structlog.testing.capture_logs() as lines:
            exact(groups, checkpoints, PROMPTS + OTHERS)
            until(
                lambda: status_of(groups).storage_faults_total + status_of(groups).storage_corrupt_total > 0
            )
        require_logged(lines, SERVER_FAULTS[fault])
        assert tier_of(ranks_of(groups)).fetched_pages == (PAGES if fault is has_no_memory else 0)
        server.woken.set()
