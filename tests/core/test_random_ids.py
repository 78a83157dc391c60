"""Random ids: all different, in every thread and behind a fork."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

from conditions import PATIENCE_S

from disagg.core.random_ids import IDS_AT_ONCE, random_id


def test_ids_differ_in_all_threads() -> None:
    found: list[str] = []
    barrier = threading.Barrier(4)

    def draw() -> None:
        barrier.wait(PATIENCE_S)
        found.extend([random_id() for _ in range(5 * IDS_AT_ONCE)])

    threads = [threading.Thread(target=draw) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == len(found) == 20 * IDS_AT_ONCE
    assert all(re.fullmatch("[0-9a-f]{32}", one) for one in found)


FORKING = """
import os
from disagg.core.random_ids import IDS_AT_ONCE, random_id
random_id()
theirs, ours = os.pipe()
if not os.fork():
    os.write(ours, "\\n".join(random_id() for _ in range(IDS_AT_ONCE)).encode())
    os._exit(0)
os.wait()
os.close(ours)
with open(theirs) as pipe:
    found = set(pipe.read().split())
assert len(found) == IDS_AT_ONCE
assert not found & {random_id() for _ in range(IDS_AT_ONCE)}
"""


def test_a_forked_process_draws_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKING], check=True, timeout=PATIENCE_S)
