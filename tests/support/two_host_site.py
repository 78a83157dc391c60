"""Ray, `disagg launch` and a router across two machines (network namespaces, `two_hosts`)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from subprocess import Popen
from typing import Any

import httpx
from conditions import PATIENCE_S, until
from two_hosts import Host, TwoHosts

from disagg.model.load.tiny import make_tiny_checkpoint
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

TOKENS = 12
PEER_TIMEOUT_S = 3.0
CONFIG = """
[model]
path = "{folder}/tiny"
[prefill]
tp = 2 # more than the second machine has CPUs: so the groups are apart
device = "cpu"
pool_tokens = 528 # one page is never used; a request may need all others
max_context_tokens = 512
chunk_tokens = 64
[decode]
tp = 1
device = "cpu"
pool_tokens = 528 # one page is never used; a request may need all others
max_context_tokens = 512
prefix_cache = false # all KV shall cross the link, each time
[control]
host = "auto"
key_file = "{folder}/keys.json"
peer_timeout_s = {peer_timeout_s}
heartbeat_s = 0.5
[cluster]
ray = "{head}:6379"
[log]
format = "json"
"""


@dataclass(frozen=True)
class Site:
    """Everything that runs on the two machines. The router is on the first one."""

    hosts: TwoHosts
    folder: Path
    threads: ThreadPoolExecutor
    """Threads on the first machine."""
    environment: Mapping[str, str]
    """Environment variables of every process."""

    def start(self, host: Host, name: str, *command: str) -> Popen[bytes]:
        """Starts a process whose output is the log `name`."""
        with (self.folder / f"{name}.log").open("wb") as output:
            return self.hosts.start(host, command, output, self.environment)

    def start_until(self, said: str, host: Host, name: str, *command: str) -> None:
        """Starts a process and waits until its log contains `said`."""
        process = self.start(host, name, *command)
        until(lambda: said in self.log(name) or process.poll() is not None)
        assert process.poll() is None, self.log(name)

    @property
    def directory(self) -> str:
        """Address of the launch's directory."""
        return f"tcp://{self.hosts.a.address}:5570"

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def ask(self, prompt: str, **fields: Any) -> Future[httpx.Response]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **fields}
        url = "http://127.0.0.1:8000/v1/completions"
        return self.threads.submit(httpx.post, url, json=body, timeout=PATIENCE_S, trust_env=False)

    def ready(self) -> bool:
        def look() -> bool:
            try:
                return httpx.get("http://127.0.0.1:8000/ready", trust_env=False).status_code == 200
            except httpx.ConnectError:
                return False

        return self.threads.submit(look).result()


@contextmanager
def site(
    hosts: TwoHosts, folder: Path, cpus: tuple[int, int] = (2, 1), settings: Mapping[str, str] | None = None
) -> Iterator[Site]:
    """Ray on both machines, the groups, and a router that is ready.

    `cpus`: Ray's CPUs on each machine. `settings`: environment variables of all processes, including Ray's.
    """
    make_tiny_checkpoint(folder / "tiny", layers=3, hidden=96, head_dim=8, mlp=96)
    save_keys(make_keys(), folder / "keys.json")
    (folder / "token").write_text("ab" * 32)
    (folder / "cluster.toml").write_text(
        CONFIG.format(folder=folder, head=hosts.a.address, peer_timeout_s=PEER_TIMEOUT_S)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_AUTH_MODE": "token"}
    environment |= {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "DISAGG_API__PORT": "8000"}
    environment |= settings or {}
    with ExitStack() as stack:
        threads = stack.enter_context(hosts.a.threads(8))
        here = Site(hosts, folder, threads, environment)
        _start_ray(here, cpus)
        launch, serve = (
            [sys.executable, "-m", "disagg", command, "--config", f"{folder}/cluster.toml"]
            for command in ("launch", "serve")
        )
        here.start_until('"launched"', hosts.a, "launch", *launch)
        here.start_until('"serving"', hosts.a, "router", *serve, "--join", here.directory)
        until(here.ready)
        yield here


def _start_ray(here: Site, cpus: tuple[int, int]) -> None:
    a, b = here.hosts.a, here.hosts.b
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--num-gpus=0", "--disable-usage-stats"]
    ray += ["--object-store-memory=100000000", "--block"]
    head = ["--head", f"--node-ip-address={a.address}", "--port=6379", f"--num-cpus={cpus[0]}"]
    head += ["--include-dashboard=false", f"--temp-dir={here.folder}/ray"]
    worker = [f"--address={a.address}:6379", f"--node-ip-address={b.address}", f"--num-cpus={cpus[1]}"]
    here.start_until("Ray runtime started", a, "head", *ray, *head)
    here.start_until("Ray runtime started", b, "worker", *ray, *worker)
