"""`disagg bench chaos --faults cut` on two machines: the network between them is cut and comes back at random.

A prefill and a decode group, the launch and the router of the bench are on the first machine; a second decode group
is on the other one. So a cut leaves a whole system, and requests need not wait for the end of the cut.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from lossy_link import LossyLink
from two_host_site import Site, site
from two_hosts import two_hosts, why_not

pytestmark = [
    pytest.mark.skipif(bool(why := why_not()), reason=why or "it can"),
    pytest.mark.slow,
    pytest.mark.timeout(900),  # cuts of up to a minute, and groups that start again on a busy machine
]

CUTS, CUTS_S = 9, "1,4,12,60"
WAYS = {"both": (0, 1), "forth": (1,), "back": (0,)}
"""The ends that receive nothing."""
SETTINGS = {
    "DISAGG_MODEL__DETERMINISTIC": "true",
    "DISAGG_DECODE__GROUPS": "2",
    "DISAGG_PREFILL__POOL_TOKENS": "8192",
    "DISAGG_DECODE__POOL_TOKENS": "8192",
    "DISAGG_CLUSTER__RESTART_BACKOFF_S": "0",
    "DISAGG_CLUSTER__RESTART_TRIES": "99",
    "DISAGG_ROUTER__GROUP_WAIT_S": "300",
    "DISAGG_ROUTER__REQUEST_TIMEOUT_S": "300",
    # Ray declares a machine dead that it does not reach for about 15 to 65 s, and ends the ranks there.
    "RAY_health_check_failure_threshold": "100",
}


@contextmanager
def cut_by_command(link: LossyLink, folder: Path) -> Iterator[Path]:
    """Yields a program for `--cut-command` that cuts and mends the link, which this process owns."""
    pipe, program = folder / "link", folder / "cut"
    pipe.touch()
    program.write_text(f'#!/bin/sh\necho "$1" >> {pipe}\n')
    program.chmod(0o700)
    ended = threading.Event()

    def follow() -> None:
        with pipe.open() as words:
            while not ended.wait(0.01):
                for word in words:
                    ends = WAYS.get(word.strip())
                    link.mend() if ends is None else link.cut(*ends)

    thread = threading.Thread(target=follow, name="cuts")
    thread.start()
    try:
        yield program
    finally:
        ended.set()
        thread.join()
        link.mend()


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        two_hosts(delay_s=0.001, jitter_s=0.0005, loss=0.001) as hosts,
        site(hosts, tmp_path_factory.mktemp("cut"), cpus=(3, 1), settings=SETTINGS) as here,
    ):
        yield here


def bench(here: Site, program: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Runs the bench on the first machine; returns its exit code and its report."""
    command = [sys.executable, "-m", "disagg", "bench", "chaos", "--config", f"{here.folder}/cluster.toml"]
    command += ["--join", here.directory, "--faults", "cut", "--cut-command", str(program)]
    command += ["--requests", "8", "--input-tokens", "16-96", "--output-tokens", "16-128"]
    process = here.start(here.hosts.a, "bench", *command, "--out", str(here.folder), *flags)
    code = process.wait()
    assert code in (0, 1), here.log("bench")
    return code, json.loads((here.folder / "bench_chaos.json").read_text())


def test_answers_while_the_network_is_cut_at_random(running: Site) -> None:
    with cut_by_command(running.hosts.link, running.folder) as program:
        cuts = ("--count", str(CUTS), "--cut-s", CUTS_S, "--gap-s", "2", "--streams", "6", "--seed", "2")
        code, report = bench(running, program, *cuts)
    faults, figures = report["faults"], report["figures"]
    assert len(faults) == CUTS
    assert {fault["role"] for fault in faults} == set(WAYS)
    assert {fault["stop_s"] for fault in faults} == {float(cut) for cut in CUTS_S.split(",")}
    assert running.hosts.link.statistics.cut > 0
    assert figures["recoveries"], "requests ran across the link"
    assert (code, figures["failed"], figures["different"], figures["not_recovered"]) == (0, {}, 0, 0)
