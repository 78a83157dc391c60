"""A whole `disagg serve` on loopback, attacked: from another machine, as another user, and with hostile frames."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from hostile_frames import fuzz_port
from second_namespace import outside, why_no_namespace
from serve_process import Served, serve_process

from disagg.sockets.guards import RANKS
from disagg.sockets.processes import Listener, listeners, process_tree

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
FRAMES = 100_000
NOBODY = 65534
STRANGER = Path(__file__).parents[1] / "support" / "stranger.py"
LOOPBACK = ("127.0.0.1", "::1")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_process(tmp_path_factory.mktemp("serve")) as served:
        assert answer(served)
        yield served


def answer(served: Served) -> str:
    """To a prompt that no cache holds, so KV crosses the data plane."""
    reply = served.client.completions.create(
        model="tiny",
        prompt="The capital",
        max_tokens=8,
        temperature=0,
        extra_body={"cache_salt": os.urandom(8).hex()},
    )
    return reply.choices[0].text


def ports(served: Served) -> list[Listener]:
    return [one for one in listeners(process_tree(served.process.pid)) if one.family == "tcp"]


def ranks(served: Served) -> dict[int, str]:
    """The kind of each rank's process, by its id."""
    tree = [psutil.Process(pid) for pid in process_tree(served.process.pid)]
    titles = {one.pid: " ".join(one.cmdline()) for one in tree}
    found = {pid: kind for pid, title in titles.items() for kind in RANKS if title.startswith(kind)}
    assert len(found) == 3, titles
    return found


def test_all_ports_are_on_loopback(served: Served) -> None:
    assert [str(one) for one in ports(served) if one.host not in LOOPBACK] == []


@pytest.mark.skipif(bool(why := why_no_namespace()), reason=why or "it can")
def test_another_machine_reaches_no_port(served: Served) -> None:
    ours = {one.port for one in ports(served)}
    with outside() as there:
        assert not ours & set(there.open_ports(range(1, 1 << 16)))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
def test_another_user_opens_nothing_of_a_rank(served: Served) -> None:
    done = subprocess.run(
        [sys.executable, str(STRANGER), str(NOBODY), *map(str, ranks(served))],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == []


def test_hostile_frames_at_every_port_end_nothing(served: Served) -> None:
    before, expected = ranks(served), answer(served)
    found = sorted({(one.host, one.port) for one in ports(served)})
    assert len(found) > len(before)
    for seed, (host, port) in enumerate(found):
        assert fuzz_port(host, port, FRAMES, seed).frames == FRAMES, (host, port)
    assert ranks(served) == before
    assert served.process.poll() is None
    assert sorted({(one.host, one.port) for one in ports(served)}) == found
    assert answer(served) == expected
    assert "Traceback" not in served.log.read_text()
