"""Two machines (network namespaces) joined by a link that delays and loses: Ray, `launch` and a router across it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from api_server import until
from two_hosts import TwoHosts, two_hosts, why_not

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.reference.answers import reference_answers
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

pytestmark = [pytest.mark.skipif(bool(why := why_not()), reason=why or "it can"), pytest.mark.slow]

TOKENS = 12
PROMPTS = ["x", "The capital of France is", "A much longer one, of several chunks. " * 8]
LONG = {"max_tokens": 300, "ignore_eos": True}
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
    """On the first machine."""

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def ask(self, prompt: str, **fields: Any) -> Future[httpx.Response]:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, **fields}
        url = "http://127.0.0.1:8000/v1/completions"
        return self.threads.submit(httpx.post, url, json=body, timeout=60, trust_env=False)

    def ready(self) -> bool:
        def look() -> bool:
            try:
                return httpx.get("http://127.0.0.1:8000/ready", trust_env=False).status_code == 200
            except httpx.ConnectError:
                return False

        return self.threads.submit(look).result()


@contextmanager
def site(hosts: TwoHosts, folder: Path) -> Iterator[Site]:
    """Ray on both machines, the groups, and a router that is ready."""
    make_tiny_checkpoint(folder / "tiny", layers=3, hidden=96, head_dim=8, mlp=96)
    save_keys(make_keys(), folder / "keys.json")
    (folder / "token").write_text("ab" * 32)
    (folder / "cluster.toml").write_text(
        CONFIG.format(folder=folder, head=hosts.a.address, peer_timeout_s=PEER_TIMEOUT_S)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_AUTH_MODE": "token"}
    environment |= {"RAY_AUTH_TOKEN_PATH": str(folder / "token"), "DISAGG_API__PORT": "8000"}
    ray = [str(Path(sys.executable).with_name("ray")), "start", "--num-gpus=0", "--disable-usage-stats"]
    ray += ["--object-store-memory=100000000", "--block"]
    disagg = [sys.executable, "-m", "disagg"]
    config = ["--config", str(folder / "cluster.toml")]
    with ExitStack() as stack:
        here = Site(hosts, folder, stack.enter_context(hosts.a.threads(8)))

        def start(host: Any, name: str, said: str, *command: str) -> None:
            output = stack.enter_context((folder / f"{name}.log").open("wb"))
            process = hosts.start(host, command, output, environment)
            until(lambda: said in here.log(name) or process.poll() is not None, timeout_s=120)
            assert process.poll() is None, here.log(name)

        head = [*ray, "--head", f"--node-ip-address={hosts.a.address}", "--port=6379", "--num-cpus=2"]
        start(
            hosts.a,
            "head",
            "Ray runtime started",
            *head,
            "--include-dashboard=false",
            f"--temp-dir={folder}/ray",
        )
        worker = [
            *ray,
            f"--address={hosts.a.address}:6379",
            f"--node-ip-address={hosts.b.address}",
            "--num-cpus=1",
        ]
        start(hosts.b, "worker", "Ray runtime started", *worker)
        start(hosts.a, "launch", '"launched"', *disagg, "launch", *config)
        start(
            hosts.a,
            "router",
            '"serving"',
            *disagg,
            "serve",
            *config,
            "--join",
            f"tcp://{hosts.a.address}:5570",
        )
        until(here.ready, timeout_s=30)
        yield here


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with (
        two_hosts(delay_s=0.005, jitter_s=0.002, loss=0.005) as hosts,
        site(hosts, tmp_path_factory.mktemp("two")) as here,
    ):
        yield here


@pytest.fixture(scope="module")
def expected(running: Site) -> list[str]:
    """What Hugging Face answers to `PROMPTS`."""
    config = Config(model=ModelConfig(path=str(running.folder / "tiny")))
    prompts = [list(prompt.encode()) for prompt in PROMPTS]
    answers = reference_answers(config, prompts, SamplingParams(max_tokens=TOKENS), lambda: None).answers
    return [bytes(answer).decode() for answer in answers]


def texts(asked: list[Future[httpx.Response]]) -> list[str]:
    replies = [one.result() for one in asked]
    assert all(reply.status_code == 200 for reply in replies), [reply.text for reply in replies]
    return [reply.json()["choices"][0]["text"] for reply in replies]


def test_answers_are_exact_over_a_bad_link(running: Site, expected: list[str]) -> None:
    link = running.hosts.link
    before = link.statistics
    for _ in range(10):
        assert texts([running.ask(prompt) for prompt in PROMPTS]) == expected
    carried, lost = link.statistics.carried - before.carried, link.statistics.lost - before.lost
    assert link.statistics.carried_bytes - before.carried_bytes > 10 * 250_000, "the KV crossed this link"
    assert lost > 0, f"of {carried} packets"


def test_a_short_cut_costs_time_only(running: Site, expected: list[str]) -> None:
    link = running.hosts.link
    cut_before = link.statistics.cut
    link.cut()
    asked = [running.ask(prompt) for prompt in PROMPTS]
    until(lambda: link.statistics.cut > cut_before + 10)
    link.mend()
    assert texts(asked) == expected


@pytest.mark.parametrize(
    "ends", [(0, 1), (0,), (1,)], ids=["both ways", "to the router", "to the decode rank"]
)
def test_requests_go_on_after_a_long_cut(running: Site, expected: list[str], ends: tuple[int, ...]) -> None:
    """The router loses the decode group, waits until the groups are linked again, and goes on exactly."""
    recovered = running.log("router").count("request_recovered")
    carried = running.hosts.link.statistics.carried
    streaming = running.ask(PROMPTS[1], **LONG)
    until(lambda: running.hosts.link.statistics.carried > carried + 60)
    running.hosts.link.cut(*ends)
    assert not streaming.done()
    asked = [running.ask(prompt) for prompt in PROMPTS]
    until(lambda: not running.ready(), timeout_s=30)
    running.hosts.link.mend()
    assert texts(asked) == expected
    assert texts([streaming]) == texts([running.ask(PROMPTS[1], **LONG)])
    assert running.log("router").count("request_recovered") > recovered
    until(running.ready, timeout_s=30)
    assert texts([running.ask(prompt) for prompt in PROMPTS]) == expected


def test_nothing_is_held_afterwards(running: Site) -> None:
    """After all that: a request that needs every page of both pools finds them free. Nobody was restarted."""
    prompt = "y" * 300
    [reply] = [running.ask(prompt, max_tokens=212, ignore_eos=True).result()]
    assert reply.status_code == 200, reply.text
    assert reply.json()["usage"]["total_tokens"] == 512
    assert "group_lost" not in running.log("launch")
