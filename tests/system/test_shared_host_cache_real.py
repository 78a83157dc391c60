"""Groups of a real server read each other's host memory, over UCX and over TLS; one of them is killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from serve_process import Served, serve_process

PROMPT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 3
SETTINGS = (
    "cluster.mode=colocated",
    "router.policy=round_robin",
    "colocated.tp=1",
    "colocated.groups=2",
    "colocated.host_cache_shared=true",
    "colocated.prefetch_min_tokens=16",
    "colocated.prefetch_base_s=5",
)
GROUPS = ("colocated", "colocated-2", "colocated-3")
WAIT_S = 60.0


def until(condition: Callable[[], bool], what: str) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def total(served: Served, name: str) -> float:
    labels = [f'{{group="{group}",rank="0",role="colocated"}}' for group in GROUPS]
    return sum(served.metric(f"disagg_shared_cache_{name}{label}") for label in labels)


def answer(served: Served, prompt: str) -> str:
    found = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    return found.choices[0].text


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["ucx", "tls"])
def test_a_server_whose_groups_share_host_memory(tmp_path: Path, backend: str) -> None:
    sets = [flag for one in (*SETTINGS, f"transport.backend={backend}") for flag in ("--set", one)]
    with serve_process(tmp_path, *sets, groups=()) as served:
        until(lambda: total(served, "peers") == 2, "the groups are connected")
        first = answer(served, PROMPT)
        stored = 'disagg_storage_written_pages_total{group="colocated",role="colocated"}'
        until(lambda: served.metric(stored) > 10, "the prompt is published")
        assert answer(served, PROMPT) == first, "the other group's answer"
        until(lambda: total(served, "read_bytes_total") > 0, "the other group has read it")
        assert total(served, "faults_total") == 0
        actors = [process for process in served.family() if "ColocatedActor" in " ".join(process.cmdline())]
        assert len(actors) == 2
        actors[0].kill()
        assert {answer(served, PROMPT) for _ in range(4)} == {first}
        until(lambda: total(served, "peers") == 2, "the new group and the surviving one are connected")
        assert {answer(served, PROMPT) for _ in range(4)} == {first}
