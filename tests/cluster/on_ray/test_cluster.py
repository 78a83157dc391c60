"""The real thing: Ray actors, one process a rank, ZMQ with CURVE, UCX. Slow to start, so few and thorough."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from broken_checkpoints import AT_BUILD
from conditions import PATIENCE_S
from launched import launch_process, reservations
from serve_process import LIGHT, ONE_RANK, SPLIT, START_TIMEOUT_S, until_gone

from disagg.cluster.group import Group
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import choose_placement
from disagg.cluster.ray import start_cluster
from disagg.commands.local import local_router, place
from disagg.core.config.read import (
    ClusterConfig,
    ColocatedConfig,
    Config,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    RouterConfig,
    TransferConfig,
    TransportConfig,
)
from disagg.core.errors import ConfigError, PeerLostError
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.reference.answers import reference_answers
from disagg.router.answers import SessionReport
from transport.keys.curve import make_keys

pytestmark = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)

GREEDY = SamplingParams(max_tokens=12)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), LIGHT, layers=3, hidden=96, head_dim=8, mlp=96
    )


def config_for(checkpoint: Path, prefill_tp: int, decode_tp: int, **transfer: Any) -> Config:
    shared: dict[str, Any] = {"pool_tokens": 2048, "max_context_tokens": 512, "device": "cpu"}
    return Config(
        model=ModelConfig(path=str(checkpoint)),
        prefill=PrefillConfig(tp=prefill_tp, page_size=16, chunk_tokens=40, **shared),
        decode=DecodeConfig(tp=decode_tp, page_size=4, **shared),
        transfer=TransferConfig(layer_groups=2, **transfer),
        router=RouterConfig(group_wait_s=0.0),  # no supervisor here replaces a group
    )


def running(config: Config) -> Any:
    placement = choose_placement(0, config.prefill.tp, config.decode.tp, "cpu")
    return start_cluster(config, placement, make_keys())


def prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(32, 127, (length,), generator=generator).tolist()
        for length in range(9, 9 + 37 * count, 37)
    ]


async def answer(router: Any, number: int, prompt: list[int], sampling: SamplingParams) -> SessionReport:
    report = SessionReport()
    async for _ in router.generate(f"r{number}", prompt, sampling, timeout_s=PATIENCE_S, report=report):
        pass
    return report


def ask_all(cluster: Cluster, asked: list[list[int]]) -> list[SessionReport]:
    async def main() -> list[SessionReport]:
        async with local_router(cluster) as router:
            return await asyncio.gather(*(answer(router, i, p, GREEDY) for i, p in enumerate(asked)))

    return asyncio.run(main())


def check_exact(config: Config, cluster: Cluster) -> None:
    asked = prompts(5)
    reports = ask_all(cluster, asked)
    cluster.check()
    for name, statistics in cluster.statistics().items():
        assert statistics["transfer"].tickets == 0, name
        assert statistics["faults"] == 0, name
    expected = reference_answers(config, asked, GREEDY, lambda: None)
    assert [report.tokens for report in reports] == expected.answers
    assert all(report.released and report.nbytes > 0 for report in reports)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "backend"),
    [
        (1, 1, None),
        (1, 1, "tls"),
        (1, 2, None),
        (1, 2, "tls"),
        (2, 1, None),
        (2, 1, "tls"),
        (4, 2, None),
    ],
)
def test_every_token_equals_hugging_face(
    ray_session: None, checkpoint: Path, prefill_tp: int, decode_tp: int, backend: str | None
) -> None:
    """`make test` covers two prefill ranks in `tests/system/served`, and TLS in the demo of
    `tests/system/test_user_faults_real.py`."""
    config = config_for(checkpoint, prefill_tp, decode_tp)
    if backend is not None:
        config = msgspec.structs.replace(config, transport=TransportConfig(backend=backend))
    with running(config) as cluster:
        check_exact(config, cluster)


@pytest.mark.slow  # `test_adoption.py` tests the error of a request whose group dies
def test_a_dead_prefill_rank_ends_requests_with_a_clear_error(ray_session: None, checkpoint: Path) -> None:
    with running(config_for(checkpoint, 1, 1)) as cluster:
        # Stopped, so that the request cannot be over before the kill.
        os.kill(cluster.prefill.started[0].pid, signal.SIGSTOP)
        ends_requests(cluster, cluster.prefill)
        pids = running_ranks(cluster.decode)
    assert not any(runs(pid) for pid in pids), "the survivors were stopped with the cluster"


@pytest.mark.slow  # `test_adoption.py` tests the error of a request whose group dies
def test_a_dead_decode_rank_ends_requests_with_a_clear_error(ray_session: None, checkpoint: Path) -> None:
    with running(config_for(checkpoint, 1, 1)) as cluster:
        ends_requests(cluster, cluster.decode)
        pids = running_ranks(cluster.prefill)
    assert not any(runs(pid) for pid in pids), "the survivors were stopped with the cluster"


def ends_requests(cluster: Cluster, group: Group) -> None:
    """Kills a rank of `group` while a request runs: the client hears of it within seconds, not minutes."""

    async def rest(stream: Any, first: asyncio.Task[Any]) -> None:
        await first
        async for _ in stream:
            pass

    async def main() -> float:
        async with local_router(cluster) as router:
            stream = router.generate(
                "r", list(range(40, 140)), SamplingParams(max_tokens=400), timeout_s=PATIENCE_S
            )
            first = asyncio.ensure_future(anext(stream))
            if group.role == "decode":
                await first
            killed_s = time.monotonic()
            os.kill(group.started[0].pid, signal.SIGKILL)
            with pytest.raises(PeerLostError):
                await rest(stream, first)
            return time.monotonic() - killed_s

    assert asyncio.run(main()) < 15


def running_ranks(survivor: Group) -> list[int]:
    """Process ids of the survivor's ranks, which all run."""
    pids = [started.pid for started in survivor.started]
    assert all(runs(pid) for pid in pids)
    return pids


def runs(pid: int) -> bool:
    """Whether the process has not ended; Ray may reap an ended one later."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def ray_processes() -> dict[int, str]:
    """Command line of each worker of this process' Ray; other tests' Rays may run beside it."""
    found: dict[int, str] = {}
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return {pid: line for pid, line in found.items() if "ray::" in line}


def small_ring(folder: Path) -> tuple[Config, str]:
    """A split system whose ring has no room for a token of its model, and what its start says."""
    wide = make_tiny_checkpoint(folder / "wide", layers=1, hidden=96, q_heads=4, kv_heads=4, head_dim=256)
    return config_for(wide, 1, 1, ring_bytes=4096, staging_bytes=4096), "needs 8192"


def other_weights(folder: Path) -> tuple[Config, str]:
    """One rank with a model whose weights have another shape."""
    broken, said = AT_BUILD["another shape"]
    model = make_tiny_checkpoint(folder / "broken", layers=1)
    broken(model)
    group = ColocatedConfig(tp=1, pool_tokens=1024, max_context_tokens=512, device="cpu")
    cluster = ClusterConfig(mode="colocated")
    return Config(model=ModelConfig(path=str(model)), colocated=group, cluster=cluster), said


@pytest.mark.slow
@pytest.mark.parametrize("of", [other_weights, small_ring])
def test_what_is_refused_at_start_leaves_nothing(
    ray_session: None, tmp_path: Path, of: Callable[[Path], tuple[Config, str]]
) -> None:
    """`make test` covers other weights in the test of a launch below, and the ring in
    `tests/system/test_small_rings.py`."""
    config, said = of(tmp_path)
    before = set(ray_processes())
    with (
        pytest.raises(ConfigError, match=re.escape(said)),
        start_cluster(config, place(config, 0), make_keys()),
    ):
        pass
    after = {pid: name for pid, name in ray_processes().items() if pid not in before}
    assert not [name for name in after.values() if "Actor" in name]


def test_a_launch_whose_rank_cannot_load_its_weights_leaves_nothing(
    ray_session: None, tmp_path: Path
) -> None:
    """The fault comes out of Ray as one line. The rank would outlive a launch that does not end it."""
    broken, said = AT_BUILD["another shape"]
    model = make_tiny_checkpoint(tmp_path / "broken", LIGHT, layers=1)
    broken(model)
    settings = ("cluster.mode=colocated", "control.directory_port=0")
    with launch_process(tmp_path / "launch", model, *settings) as launch:
        assert launch.process.wait(START_TIMEOUT_S) == 2
        log = launch.log.read_text()
        assert reservations() == []
        actors = []
        for pid in (pid for pid, name in ray_processes().items() if "Actor" in name):
            with contextlib.suppress(psutil.NoSuchProcess):
                actors.append(psutil.Process(pid))
        until_gone(actors)
    last = log.splitlines()[-1]
    assert last.startswith("disagg: ")
    assert said in last
    for noise in ("Traceback", "ray::", "RayTaskError", "(pid="):
        assert noise not in log


@pytest.mark.slow  # the test above covers this for a whole command
def test_a_rank_that_fails_to_start_is_reported_as_itself(ray_session: None, checkpoint: Path) -> None:
    config = msgspec.structs.replace(
        config_for(checkpoint, 1, 1), model=ModelConfig(path=str(checkpoint / "nowhere"))
    )
    with pytest.raises(ConfigError, match="no such model directory"), running(config):
        pass


@pytest.fixture
def heard_sigint() -> Iterator[None]:
    """What is started here hears SIGINT, also in a shell's background, where it is ignored and inherited so."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    "groups", [ONE_RANK, pytest.param(SPLIT, marks=pytest.mark.slow)], ids=["one_rank", "split"]
)
def test_ctrl_c_leaves_nothing_running(
    checkpoint: Path, tmp_path: Path, heard_sigint: None, groups: tuple[str, ...]
) -> None:
    log = tmp_path / "stderr"
    command = [
        sys.executable,
        "-m",
        "disagg",
        "generate",
        "--model",
        str(checkpoint),
        "--device",
        "cpu",
        *groups,
    ]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--max-tokens", "1900", "hello"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            cwd=Path(__file__).parents[3],
        ) as process,
    ):
        assert process.stdout is not None
        assert process.stdout.read(1), "an answer has begun"
        family = psutil.Process(process.pid).children(recursive=True)
        os.kill(process.pid, signal.SIGINT)
        rest = process.stdout.read()
        assert process.wait(timeout=60) == 130, f"{len(rest)} more bytes came; stderr: {log.read_text()}"
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
