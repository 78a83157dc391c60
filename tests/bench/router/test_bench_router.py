"""The router benchmark: figures with their floors, and an error for an answer that differs from its prompt."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from disagg.bench.router.client import StreamConnection, StreamCounts, prompt_text
from disagg.bench.router.run import RouterBench
from disagg.bench.router.server import router_config
from disagg.cli.app import run
from disagg.core.config.observability import MetricsConfig
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, InvariantError

SMALL = [
    *("--streams", "6", "--groups", "2,4", "--rate", "600", "--window-tokens", "24"),
    *("--requests", "8", "--input-tokens", "40", "--repeats", "2"),
]


def quick_config(keys: Path, port: int, streams: int) -> Config:
    """The benchmark's settings, except that new groups report within a quarter of a second."""
    config = router_config(keys, port, streams)
    return msgspec.structs.replace(config, metrics=MetricsConfig(interval_s=0.25))


def test_the_command_writes_figures_with_their_floor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("disagg.bench.router.run.IDLE_S", 0.3)
    monkeypatch.setattr("disagg.bench.router.run.router_config", quick_config)
    assert run(["bench", "router", *SMALL, "--out", str(tmp_path)]) == 0
    assert "token, 6 streams, 2 groups" in capsys.readouterr().out
    results = json.loads((tmp_path / "bench_router.json").read_text())["results"]
    found = {line["title"]: line for line in results}
    for groups in (2, 4):
        for what in ("token", "request"):
            line = found[f"{what}, 6 streams, {groups} groups"]
            assert len(line["values"]) == 2
            assert line["high"] > 0
            assert line["ceiling"]["median"] > 0


class Written:
    """Keeps what a connection sends."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def answered(text: str, cuts: int) -> StreamConnection:
    """A connection that has received an answer of `text`, in pieces of `cuts` bytes."""
    events = [
        b'data: {"choices":[{"index":0,"text":"%b","finish_reason":%b}]}\n\n'
        % (letter.encode(), b'"length"' if at == len(text) - 1 else b"null")
        for at, letter in enumerate(text)
    ]
    chunks = [b"%x\r\n%b\r\n" % (len(event), event) for event in [*events, b"data: [DONE]\n\n"]]
    reply = b"HTTP/1.1 200 OK\r\n\r\n" + b"".join(chunks) + b"0\r\n\r\n"

    async def receive() -> StreamConnection:
        connection = StreamConnection(StreamCounts())
        connection.connection_made(Written())
        connection.send("here", prompt_text(7, 8), len(text))
        for at in range(0, len(reply), cuts):
            connection.data_received(reply[at : at + cuts])
        assert connection.ended.done()
        return connection

    return asyncio.run(receive())


@pytest.mark.parametrize("cuts", [1, 3, 50, 10_000])
def test_the_client_counts_tokens_of_cut_events(cuts: int) -> None:
    connection = answered("000007ab00", cuts)
    assert connection.tokens == 10
    connection.check()


@pytest.mark.parametrize("text", ["000007abab", "000008ab00", "000007a"])
def test_a_wrong_answer_is_an_error(text: str) -> None:
    connection = answered(text, 100)
    connection.tokens = 10
    with pytest.raises(InvariantError, match="wrong answer"):
        connection.check()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"groups": (3,)}, "--groups"),
        ({"streams": (0,)}, "--streams"),
        ({"window_tokens": 5000}, "--window-tokens"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any], names: str) -> None:
    usual: dict[str, Any] = {
        **{"streams": (4,), "groups": (2,), "tokens_per_s": 100.0, "window_tokens": 8},
        **{"requests": 1, "prompt_tokens": 64, "repeats": 1},
    }
    RouterBench(**usual)
    with pytest.raises(ConfigError, match=names):
        RouterBench(**{**usual, **change})
