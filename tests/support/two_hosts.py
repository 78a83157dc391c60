"""Two "machines" on this one: network namespaces, each with an address of its own, joined by a lossy link.

Processes and files are shared; the network is not. Needs root and /dev/net/tun: `why_not` says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from lossy_link import LossyLink, open_tun

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class Host:
    """One of the two."""

    name: str
    """Of its namespace."""
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs `command` there."""
        return ["ip", "netns", "exec", self.name, *command]

    def threads(self, count: int) -> ThreadPoolExecutor:
        """Threads of this process, started, whose new sockets are that host's."""
        pool, all_there = ThreadPoolExecutor(count, initializer=self._enter), threading.Barrier(count)
        for started in [pool.submit(all_there.wait, 10) for _ in range(count)]:
            started.result()
        return pool

    def _enter(self) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        with Path("/run/netns", self.name).open() as namespace:
            if libc.setns(namespace.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), f"setns {self.name}")


@dataclass(slots=True)
class TwoHosts:
    """Use `two_hosts`."""

    a: Host
    b: Host
    link: LossyLink
    _processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(
        self, host: Host, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """A process on a host, in a session of its own; ended at the end of the block, if it has not by then."""
        process = subprocess.Popen(
            host.command(command),
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=dict(environment),
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def end(self, process: subprocess.Popen[bytes], timeout_s: float = 30.0) -> int:
        """SIGTERM, and when that is not heard in time, SIGKILL to its whole session; its exit code."""
        process.terminate()
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return process.wait()

    def end_all(self) -> None:
        """The latest first."""
        while self._processes:
            self.end(self._processes.pop())


def why_not() -> str:
    """Why this machine cannot have two hosts; empty when it can."""
    if shutil.which("ip") is None:
        return "needs the command ip (iproute2)"
    try:
        os.close(open_tun(f"t{secrets.token_hex(4)}"))
    except OSError as error:
        return f"needs root and /dev/net/tun: {error}"
    name = f"disagg-{secrets.token_hex(4)}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True, check=False)
    if made.returncode:
        return f"needs network namespaces: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "delete", name], check=True)
    return ""


@contextlib.contextmanager
def two_hosts(*, delay_s: float, jitter_s: float, loss: float, seed: int = 0) -> Iterator[TwoHosts]:
    """Two hosts, 10.77.0.1 and 10.77.0.2, that reach each other over the link and nothing else."""
    mark = secrets.token_hex(3)
    hosts = [Host(f"disagg-{mark}-{side}", f"10.77.0.{side}") for side in (1, 2)]
    with contextlib.ExitStack() as stack:
        ends = []
        for host, device in zip(hosts, (f"t{mark}-1", f"t{mark}-2"), strict=True):
            ends.append(open_tun(device))
            _ip("netns", "add", host.name)
            stack.callback(_ip, "netns", "delete", host.name)
            _ip("link", "set", device, "netns", host.name)
            for words in (
                f"link set {device} name wire",
                "link set lo up",
                f"address add {host.address}/24 dev wire",
                "link set wire up",
                "route add default dev wire",  # as machines have one: it says which address is theirs
            ):
                _ip("-n", host.name, *words.split())
        link = LossyLink((ends[0], ends[1]), delay_s=delay_s, jitter_s=jitter_s, loss=loss, seed=seed)
        pair = TwoHosts(*hosts, stack.enter_context(link))
        stack.callback(pair.end_all)
        yield pair


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
