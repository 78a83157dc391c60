"""The real thing: Ray actors, one process a rank, ZMQ with CURVE, UCX. Slow to start, so few and thorough."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from structlog.testing import capture_logs

from disagg.cli import app as cli
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.placement import choose_placement
from disagg.cluster.ray import local_ray, start_cluster
from disagg.commands.local import local_router, place
from disagg.core.config.read import (
    Config,
    DecodeConfig,
    ModelConfig,
    PrefillConfig,
    TransferConfig,
    TransportConfig,
    load_config,
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
    return make_tiny_checkpoint(tmp_path_factory.mktemp("tiny"), layers=3, hidden=96, head_dim=8, mlp=96)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ranks take for the user's cache."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def ray_session(cache: Path) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        with local_ray(6):
            yield


def config_for(checkpoint: Path, prefill_tp: int, decode_tp: int, **transfer: Any) -> Config:
    shared: dict[str, Any] = {"pool_tokens": 2048, "max_context_tokens": 512, "device": "cpu"}
    return Config(
        model=ModelConfig(path=str(checkpoint)),
        prefill=PrefillConfig(tp=prefill_tp, page_size=16, chunk_tokens=40, **shared),
        decode=DecodeConfig(tp=decode_tp, page_size=4, **shared),
        transfer=TransferConfig(layer_groups=2, **transfer),
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
    async for _ in router.generate(f"r{number}", prompt, sampling, timeout_s=60, report=report):
        pass
    return report


def ask_all(cluster: Cluster, asked: list[list[int]]) -> list[SessionReport]:
    async def main() -> list[SessionReport]:
        async with local_router(cluster) as router:
            return await asyncio.gather(*(answer(router, i, p, GREEDY) for i, p in enumerate(asked)))

    return asyncio.run(main())


def check_exact(
    checkpoint: Path, prefill_tp: int, decode_tp: int, backend: str | None = None, **transfer: Any
) -> None:
    config = config_for(checkpoint, prefill_tp, decode_tp, **transfer)
    if backend is not None:
        config = msgspec.structs.replace(config, transport=TransportConfig(backend=backend))
    asked = prompts(5)
    with running(config) as cluster:
        reports = ask_all(cluster, asked)
        cluster.check()
        for name, statistics in cluster.statistics().items():
            assert statistics["transfer"].tickets == 0, name
            assert statistics["faults"] == 0, name
    expected = reference_answers(config, asked, GREEDY, lambda: None)
    assert [report.tokens for report in reports] == expected.answers
    assert all(report.released and report.nbytes > 0 for report in reports)


@pytest.mark.parametrize(
    ("prefill_tp", "decode_tp", "backend"),
    [
        (2, 1, None),
        (1, 2, "tls"),
        pytest.param(1, 2, None, marks=pytest.mark.slow),
        pytest.param(2, 1, "tls", marks=pytest.mark.slow),
        pytest.param(4, 2, None, marks=pytest.mark.slow),
    ],
)
def test_every_token_equals_hugging_face(
    ray_session: None, checkpoint: Path, prefill_tp: int, decode_tp: int, backend: str | None
) -> None:
    check_exact(checkpoint, prefill_tp, decode_tp, backend)


def test_the_wire_is_measured_at_start_and_said(ray_session: None, checkpoint: Path, cache: Path) -> None:
    with capture_logs() as lines:
        check_exact(checkpoint, 1, 1, calibrate="always")
    [line] = [line for line in lines if line["event"] == "wire"]
    assert (line["log_level"], line["link"]) == ("info", "prefill rank 0 to decode")
    assert line["path"] == "staging and ring, by ucx-shm"
    assert line["found"].startswith("measured: ")
    [key] = json.loads((cache / "disagg" / "wire.json").read_text())["wires"]
    assert "cpu; ucx-shm; 1." in key


@pytest.mark.parametrize("role", [pytest.param("prefill", marks=pytest.mark.slow), "decode"])
def test_a_dead_rank_ends_requests_with_a_clear_error(ray_session: None, checkpoint: Path, role: str) -> None:
    """The actor's process is killed while a request runs: the client hears of it within seconds, not minutes."""

    async def rest(stream: Any, first: asyncio.Task[Any]) -> None:
        await first
        async for _ in stream:
            pass

    async def main(cluster: Cluster) -> float:
        group = cluster.prefill if role == "prefill" else cluster.decode
        async with local_router(cluster) as router:
            stream = router.generate("r", list(range(40, 140)), SamplingParams(max_tokens=400), timeout_s=60)
            first = asyncio.ensure_future(anext(stream))
            if role == "decode":
                await first
            killed_s = time.monotonic()
            os.kill(group.started[0].pid, signal.SIGKILL)
            with pytest.raises(PeerLostError):
                await rest(stream, first)
            return time.monotonic() - killed_s

    with running(config_for(checkpoint, 1, 1)) as cluster:
        if role == "prefill":
            # Stopped, so that the request cannot be over before the kill.
            os.kill(cluster.prefill.started[0].pid, signal.SIGSTOP)
        took_s = asyncio.run(main(cluster))
        survivor = cluster.decode if role == "prefill" else cluster.prefill
        assert took_s < 15
        pids = [started.pid for started in survivor.started]
        assert all(psutil.pid_exists(pid) for pid in pids)
    assert not any(psutil.pid_exists(pid) for pid in pids), "the survivors were stopped with the cluster"


def ray_processes() -> dict[int, str]:
    """Command line of each of Ray's workers; those that end meanwhile have none."""
    lines = {p.pid: " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])}
    return {pid: line for pid, line in lines.items() if "ray::" in line}


def test_a_ring_too_small_is_refused_at_start_and_nothing_is_left(
    ray_session: None, checkpoint: Path
) -> None:
    config = config_for(checkpoint, 1, 1, ring_bytes=4096, staging_bytes=4096)
    wide = make_tiny_checkpoint(
        checkpoint.parent / "wide", layers=1, hidden=96, q_heads=4, kv_heads=4, head_dim=256
    )
    before = set(ray_processes())
    config = msgspec.structs.replace(config, model=ModelConfig(path=str(wide)))
    with pytest.raises(ConfigError, match="needs 8192"), running(config):
        pass
    after = {pid: name for pid, name in ray_processes().items() if pid not in before}
    assert not [name for name in after.values() if "Actor" in name]


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


def test_ctrl_c_leaves_nothing_running(checkpoint: Path, tmp_path: Path, heard_sigint: None) -> None:
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
    ]
    with (
        log.open("wb") as stderr,
        subprocess.Popen(
            [*command, "--max-tokens", "1900", "hello"],
            stdout=subprocess.PIPE,
            stderr=stderr,
            start_new_session=True,
            cwd=Path(__file__).parents[2],
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


def test_a_call_after_the_end_starts_no_new_ray() -> None:
    """A watcher that Ctrl-C left alone may look once more."""
    code = (
        "from disagg.cluster.ray import local_ray\n"
        "with local_ray(1):\n"
        "    import ray\n"
        "    ref = ray.put(1)\n"
        "try:\n"
        "    ray.wait([ref])\n"
        "except ray.exceptions.RayError:\n"
        "    raise SystemExit(0 if not ray.is_initialized() else 7)\n"
        "raise SystemExit(8)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2], timeout=60)
    assert ended.returncode == 0


def test_without_ray_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed: pip install"), local_ray(2):
        pass
    assert ConfigError.exit_code == 2


def test_a_ray_cluster_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert cli.run(["generate", "hi", "--device", "cpu", "--set", f"cluster.ray={address}"]) == 2
    error = capsys.readouterr().err
    assert f"disagg: no Ray cluster to join at '{address}'" in error


def test_a_port_in_use_is_one_line_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["generate", "hi", "--device", "cpu", "--set", f"control.router_port={port}"]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert error.count("disagg: ") == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "chosen"),
    [("auto", "auto", "auto"), ("cpu", "auto", "cpu"), ("auto", "cpu", "cpu"), ("auto", "cuda", "cuda")],
)
def test_one_kind_of_device_for_both_groups(
    prefill: str, decode: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def choose(
        gpus: int, prefill_tp: int | None, decode_tp: int | None, device: str, groups: tuple[int, int]
    ) -> None:
        asked.append(device)

    monkeypatch.setattr("disagg.commands.local.choose_placement", choose)
    place(load_config(None, {}, {"prefill.device": prefill, "decode.device": decode}), gpus=2)
    assert asked == [chosen]


def test_two_kinds_of_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill.device = cuda and decode.device = cpu: both groups"):
        place(load_config(None, {}, {"prefill.device": "cuda", "decode.device": "cpu"}), gpus=2)
