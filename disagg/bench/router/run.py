"""Runs `disagg bench router`: a router, simulated groups and a load client, each in its own process."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from disagg.bench.common.processes import Processes, Remote
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.router.client import LoadClient
from disagg.bench.router.cpu import cpu_s
from disagg.bench.router.floor import FloorServer
from disagg.bench.router.leaders import CONTEXT_TOKENS, SHORT_TOKENS, SimulatedGroups
from disagg.bench.router.server import HOST, MODEL, free_port, router_config, running_router, wait_for_groups
from disagg.core.config.read import ControlConfig
from disagg.core.errors import ConfigError
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

TIMEOUT_S = 120.0
"""Time limit until the tokens of one measured window have arrived."""
OPEN_TIMEOUT_S = 600.0
"""Time limit until all streams have their first token."""
IDLE_S = 2.0
"""Duration of the measurement without requests, which gives the cost of heartbeats and reports."""
CONCURRENCY = 8
"""Number of short requests in flight."""


@dataclass(frozen=True)
class RouterBench:
    """Settings of a run. Each number in `streams` is measured with each number in `groups`."""

    streams: tuple[int, ...]
    groups: tuple[int, ...]
    tokens_per_s: float
    """Rate of tokens over all streams."""
    window_tokens: int
    """Tokens of one measurement over all streams; each stream sends at least one token."""
    requests: int
    """Short requests of one measurement."""
    prompt_tokens: int
    repeats: int

    def __post_init__(self) -> None:
        if any(count < 2 or count % 2 for count in self.groups):
            raise ConfigError("--groups: give even numbers from 2; half of the groups prefill, half decode")
        if min(self.streams) < 1:
            raise ConfigError("--streams: give numbers from 1")
        longest = 2 + max(self.steps(streams) for streams in self.streams) * self.repeats
        if self.prompt_tokens + longest > CONTEXT_TOKENS:
            raise ConfigError(
                f"--window-tokens {self.window_tokens}: streams of {longest} tokens exceed the context of "
                f"{CONTEXT_TOKENS}; give fewer tokens, or more --streams"
            )

    def steps(self, streams: int) -> int:
        """Returns the number of tokens that each stream sends in one measurement."""
        return max(1, self.window_tokens // streams)


@dataclass
class RouterPoint:
    """Figures of one combination of streams and groups: CPU time in microseconds, less the CPU time of an idle
    router."""

    streams: int
    groups: int
    idle_share: float = 0.0
    """CPU seconds that the idle router uses per second."""
    opening_us: float = 0.0
    """CPU time per request that opens a stream, including its new connection and first token."""
    token_us: list[float] = field(default_factory=list)
    request_us: list[float] = field(default_factory=list)


@dataclass
class FloorPoint:
    """CPU time in microseconds that no router can avoid: writing chunks, receiving messages, handling requests."""

    chunk_us: dict[int, list[float]] = field(default_factory=dict)
    """CPU time per written chunk, by number of streams."""
    token_us: dict[int, list[float]] = field(default_factory=dict)
    """CPU time per received token, by the number of tokens in a message."""
    request_us: list[float] = field(default_factory=list)


def run(bench: RouterBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the floor, then each combination of streams and groups. Raises `InvariantError` for a wrong answer."""
    from disagg.model.load.source import ModelSource

    with tempfile.TemporaryDirectory(prefix="disagg-router-") as folder, Processes() as processes:
        keys, port = Path(folder) / "keys", free_port()
        save_keys(make_keys(), keys)
        control = ControlConfig(key_file=str(keys), directory_port=0)
        fingerprint = ModelSource.random_init(MODEL).fingerprint
        groups = processes.start(
            "groups", None, SimulatedGroups, max(bench.groups) // 2, fingerprint, control
        )
        report_progress("floor")
        floor = _floor(bench, processes, groups, control)
        config = router_config(keys, port, max(bench.streams))
        with running_router(processes, config, groups.call("directory"), Path(folder) / "log") as router:
            client = processes.start("client", None, LoadClient, HOST, port, bench.prompt_tokens)
            points = []
            for count in sorted(bench.groups):
                groups.call("announce", count // 2)
                wait_for_groups(port, count)
                for streams in sorted(bench.streams):
                    report_progress(f"{streams} streams, {count} groups")
                    points.append(_point(bench, RouterPoint(streams, count), router, groups, client))
    return _results(points, floor)


def _point(
    bench: RouterBench, point: RouterPoint, router: Remote, groups: Remote, client: Remote
) -> RouterPoint:
    idle = CpuWindow(router.pid)
    time.sleep(IDLE_S)
    point.idle_share = idle.seconds() / IDLE_S
    opening = CpuWindow(router.pid, point.idle_share)
    steps = bench.steps(point.streams)
    client.start_call("open", point.streams, 2 + steps * bench.repeats)
    client.answer(OPEN_TIMEOUT_S)
    point.opening_us = opening.seconds() / point.streams * 1e6
    for _ in range(bench.repeats):
        before = client.call("received")
        window = CpuWindow(router.pid, point.idle_share)
        sent = groups.call("decode", steps, bench.tokens_per_s)
        client.call("wait_received", before + sent, TIMEOUT_S)
        point.token_us.append(window.seconds() / sent * 1e6)
    for _ in range(bench.repeats):
        window = CpuWindow(router.pid, point.idle_share)
        client.call("requests", bench.requests, CONCURRENCY, SHORT_TOKENS)
        point.request_us.append(window.seconds() / bench.requests * 1e6)
    groups.call("finish")
    client.call("finish")
    return point


class CpuWindow:
    """Measures the CPU seconds of a process since this object's creation, less those of an idle process."""

    def __init__(self, pid: int, idle_share: float = 0.0) -> None:
        self._pid, self._idle_share = pid, idle_share
        self._began_s, self._cpu_s = time.monotonic(), cpu_s(pid)

    def seconds(self) -> float:
        """Returns the CPU seconds so far, less those of an idle process."""
        return cpu_s(self._pid) - self._cpu_s - self._idle_share * (time.monotonic() - self._began_s)


def _floor(bench: RouterBench, processes: Processes, groups: Remote, control: ControlConfig) -> FloorPoint:
    """Measures the work that no router can avoid (HTTP, chunks, control messages), in a process without a router."""
    found = FloorPoint()
    server = processes.start("floor", None, FloorServer, event_of_a_token(), control)
    pid, port, address = server.call("where")
    client = processes.start("floor client", None, LoadClient, HOST, port, bench.prompt_tokens)
    messages = 0
    for streams in bench.streams:
        client.call("open", streams, CONTEXT_TOKENS)
        found.chunk_us[streams] = [
            _chunk_us(bench, streams, pid, server, client) for _ in range(bench.repeats)
        ]
        client.call("drop")
    for tokens in sorted(
        {max(1, streams // (count // 2)) for streams in bench.streams for count in bench.groups}
    ):
        count = max(1, bench.window_tokens // tokens)
        found.token_us[tokens] = []
        for _ in range(bench.repeats):
            window, messages = CpuWindow(pid), messages + count
            groups.call("send_steps", address, tokens, count, bench.tokens_per_s)
            server.call("wait_messages", messages, TIMEOUT_S)
            found.token_us[tokens].append(window.seconds() / (count * tokens) * 1e6)
    for _ in range(bench.repeats):
        window = CpuWindow(pid)
        client.call("requests", bench.requests, CONCURRENCY, SHORT_TOKENS, False)
        found.request_us.append(window.seconds() / bench.requests * 1e6)
    return found


def _chunk_us(bench: RouterBench, streams: int, pid: int, server: Remote, client: Remote) -> float:
    steps, before, window = bench.steps(streams), client.call("received"), CpuWindow(pid)
    server.call("write", steps, bench.tokens_per_s / streams)
    client.call("wait_received", before + steps * streams, TIMEOUT_S)
    return window.seconds() / (steps * streams) * 1e6


def event_of_a_token() -> bytes:
    """Returns an event of one token, as the API sends it."""
    return (
        b'data: {"id":"cmpl-%b","object":"text_completion","created":1700000000,"model":"%b","choices":[{"index":0,'
        b'"text":"a","logprobs":null,"finish_reason":null}]}\n\n' % (b"0" * 32, MODEL.encode())
    )


def _results(points: list[RouterPoint], floor: FloorPoint) -> list[Result]:
    """Returns the figures of all combinations of streams and groups. The floor of a token's cost is the cost of its
    chunk plus its share of a message's cost."""
    found = []
    for p in points:
        labels: dict[str, Label] = {"streams": p.streams, "groups": p.groups}
        where = f"{p.streams} streams, {p.groups} groups"
        parts = floor.chunk_us[p.streams], floor.token_us[max(1, p.streams // (p.groups // 2))]
        token = Measurement("floor", "us", tuple(map(sum, zip(*parts, strict=True))))
        request = Measurement("floor", "us", tuple(floor.request_us))
        found += [
            Result(f"token, {where}", Measurement("CPU", "us", tuple(p.token_us)), token, labels),
            Result(f"request, {where}", Measurement("CPU", "us", tuple(p.request_us)), request, labels),
            Result(f"open a stream, {where}", Measurement("CPU", "us", (p.opening_us,)), None, labels),
            Result(f"idle, {where}", Measurement("CPU", "ms/s", (1e3 * p.idle_share,)), None, labels),
        ]
    return found
