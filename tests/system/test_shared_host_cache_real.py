"""Groups of a real server read each other's host memory, over UCX and over TLS; one of them is killed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from conditions import until
from serve_process import Served, serve_process

PROMPT = "All happy families are alike; every unhappy family is unhappy in its own way. " * 3
SETTINGS = ("groups=2", "tp=1", "host_cache_shared=true", "prefetch_min_tokens=16", "prefetch_base_s=5")


def total(served: Served, role: str, name: str) -> float:
    """The sum over the ranks of all groups of a role, also of a third one that replaces a group."""
    groups = [role, *(f"{role}-{number}" for number in (2, 3))]
    labels = [f'{{group="{group}",rank="0",role="{role}"}}' for group in groups]
    return sum(served.metric(f"disagg_shared_cache_{name}{label}") for label in labels)


def answer(served: Served, prompt: str) -> str:
    found = served.client.completions.create(model="tiny", prompt=prompt, max_tokens=8, temperature=0)
    return found.choices[0].text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "role", "fault"),
    [
        ("ucx", "prefill", signal.SIGKILL),
        ("ucx", "colocated", signal.SIGSTOP),
        ("tls", "prefill", signal.SIGSTOP),
        ("tls", "colocated", signal.SIGKILL),
    ],
)
def test_a_server_whose_groups_share_host_memory(
    tmp_path: Path, backend: str, role: str, fault: signal.Signals
) -> None:
    """A prefill rank also has a transport for the KV of requests, a colocated rank only the one for shared memory."""
    sets = [f"{role}.{one}" for one in SETTINGS] + [
        f"transport.backend={backend}",
        "router.policy=round_robin",
    ]
    sets += ["cluster.hang_timeout_s=5", "control.peer_timeout_s=4", "control.heartbeat_s=1"]
    sets += ["cluster.mode=colocated"] if role == "colocated" else ["decode.tp=1"]
    with serve_process(tmp_path, *(flag for one in sets for flag in ("--set", one)), groups=()) as served:
        until(lambda: total(served, role, "peers") == 2, "the groups are connected")
        first = answer(served, PROMPT)
        stored = f'disagg_storage_written_pages_total{{group="{role}",role="{role}"}}'
        until(lambda: served.metric(stored) > 10, "the prompt is published")
        assert answer(served, PROMPT) == first, "the other group's answer"
        until(lambda: total(served, role, "read_bytes_total") > 0, "the other group has read it")
        assert total(served, role, "faults_total") == 0
        kind = f"{role.title()}Actor"
        actors = [process for process in served.family() if kind in " ".join(process.cmdline())]
        assert len(actors) == 2
        actors[0].send_signal(fault)  # a stopped process counts as hung, and is killed later
        assert {answer(served, PROMPT) for _ in range(4)} == {first}
        until(lambda: total(served, role, "peers") == 2, "the new group and the surviving one are connected")
        assert {answer(served, PROMPT) for _ in range(4)} == {first}
        assert "tls_refused" not in served.log.read_text()
