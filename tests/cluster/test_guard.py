"""The guard ends the processes of a command that was killed, also orphans and those without their environment."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from conditions import PATIENCE_S, until

from disagg.cluster.guard import processes_of
from disagg.cluster.local_ray import PrivateRay, guarded

ROOT = Path(__file__).parents[2]
COMMAND = """
import subprocess, sys, time
from pathlib import Path
from disagg.cluster.local_ray import guarded
folder = Path(sys.argv[1])
folder.mkdir()
other = subprocess.Popen(["sleep", "1000"])
own = (folder / "own").open("w")
with guarded(folder):
    inherits = subprocess.Popen(["sleep", "1001"])
    with (folder / "log").open("w") as log:
        writes = subprocess.Popen(["env", "-i", "sleep", "1002"], stdout=log)
    orphan = subprocess.run(["sh", "-c", "sleep 1003 & echo $!"], stdout=subprocess.PIPE, text=True)
    child = subprocess.Popen(["sh", "-c", "env -i sleep 1004 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    print(other.pid, inherits.pid, writes.pid, int(orphan.stdout), int(child.stdout.readline()), flush=True)
    sys.stdin.read()
"""


def until_gone(process: psutil.Process) -> None:
    until(
        lambda: not process.is_running() or process.status() == psutil.STATUS_ZOMBIE,
        lambda: f"{process} ends",
    )


@pytest.mark.skipif(sys.platform != "linux", reason="the guard reads /proc")
@pytest.mark.parametrize("killed", [True, False])
def test_nothing_outlives_the_command(tmp_path: Path, killed: bool) -> None:
    folder = tmp_path / "ray"
    # The orphan's shell waits for its output; a file does not.
    source = COMMAND.replace("sleep 1003 &", "sleep 1003 > /dev/null & ")
    with subprocess.Popen(
        [sys.executable, "-c", source, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    ) as command:
        assert command.stdout is not None
        assert command.stdin is not None
        other, *ours = [psutil.Process(int(pid)) for pid in command.stdout.readline().split()]
        try:
            assert len(ours) == 4
            if killed:
                command.kill()
            else:
                command.stdin.close()
            for process in ours:
                until_gone(process)
            command.wait(PATIENCE_S)
            assert other.is_running(), "a process that is not Ray's goes on"
        finally:
            for process in (other, *ours):
                if process.is_running():
                    process.kill()
            command.kill()
    assert command.returncode == (-9 if killed else 0), "the guard spares the command"
    until(lambda: not killed or not folder.exists(), "the folder is removed")
    assert folder.exists() is not killed, (
        "a command that ends by itself removes its folder, or keeps the logs"
    )


def test_a_failed_ray_is_named_and_its_processes_are_killed(tmp_path: Path) -> None:
    """The servers are children of the command, by their names."""
    server = tmp_path / "raylet"
    server.symlink_to("/bin/sleep")
    with guarded(tmp_path) as private:
        assert isinstance(private, PrivateRay)
        raylet, agent = subprocess.Popen([str(server), "1000"]), subprocess.Popen(["sleep", "1000"])
        try:
            private.started()
            assert private.failure() == ""
            raylet.kill()
            until_gone(psutil.Process(raylet.pid))
            assert private.failure() == f"Ray's raylet (pid {raylet.pid}) has ended"
            private.kill()
            assert agent.wait(PATIENCE_S) == -9
            assert private.failure(), "also when its status was read"
        finally:
            for process in (raylet, agent):
                process.kill()
                process.wait()
    assert not processes_of("another mark", str(tmp_path / "another"), 0)
