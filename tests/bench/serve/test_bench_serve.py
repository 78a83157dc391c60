"""`disagg bench serve` as a command: real requests to a scripted server, its reports and exit codes."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from scripted_server import Reply, ScriptedServer, Seen, answer_rightly

from disagg.cli.app import run
from disagg.cli.bench import serve as cli_bench_serve

SMALL = ["--input-tokens", "4-8", "--output-tokens", "3", "--ignore-eos"]


def bench(server: ScriptedServer, *flags: str) -> int:
    return run(["bench", "serve", "--url", server.url, *SMALL, *flags])


def is_probe(seen: Seen) -> bool:
    return bool(seen.body["max_tokens"] == 1)


def test_an_open_loop_reports_and_keeps_every_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting = asyncio.Event()  # of the server's event loop

    async def script(seen: Seen, reply: Reply) -> None:
        """Answers nothing before everything has come."""
        if not is_probe(seen):
            if len(server.seen) == 1 + 12:
                waiting.set()
            await waiting.wait()
        await answer_rightly(seen, reply)

    with ScriptedServer(script) as server:
        code = bench(
            server, "--rate", "400", "--requests", "12", "--slo-ttft-s", "30", "--out", str(tmp_path)
        )
    shown = capsys.readouterr().out
    assert code == 0
    assert "12 of 12 requests answered correctly" in shown
    assert "goodput" in shown
    assert "at most 12 requests at once" in shown
    assert (tmp_path / "bench_serve.png").stat().st_size > 10_000
    found = json.loads((tmp_path / "bench_serve.json").read_text())
    assert found["settings"]["model"] == "scripted"
    assert found["summary"]["ok"] == len(found["requests"]) == 12
    assert found["summary"]["most_running"] == 12
    assert found["summary"]["goodput"] == found["summary"]["request_rate"]
    assert [row["index"] for row in found["requests"]] == list(range(12))
    probe, *others = server.seen
    assert is_probe(probe)
    sent = sorted(len(one.body["prompt"]) for one in others)
    assert sorted(row["input_tokens"] for row in found["requests"]) == sent


def test_equal_seeds_send_equal_requests(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = []
    for seed in ("1", "1", "2"):
        with ScriptedServer() as server:
            assert bench(server, "--concurrency", "1", "--requests", "3", "--seed", seed, "--json") == 0
        prompts.append([one.body["prompt"] for one in server.seen])
        assert json.loads(capsys.readouterr().out)["summary"]["late_s"] is None
    assert prompts[0] == prompts[1] != prompts[2]


def test_a_closed_loop_never_has_more_under_way(capsys: pytest.CaptureFixture[str]) -> None:
    running, most = 0, 0

    async def script(seen: Seen, reply: Reply) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await answer_rightly(seen, reply)
        running -= 1

    with ScriptedServer(script) as server:
        assert (
            bench(server, "--concurrency", "3", "--requests", "20", "--model", "m", "--chat", "--json") == 0
        )
    assert most <= 3
    assert len(server.seen) == 21
    assert {one.body["model"] for one in server.seen} == {"m"}
    assert json.loads(capsys.readouterr().out)["summary"]["most_running"] == 3


@pytest.mark.parametrize(
    ("status", "strict", "code"), [(429, True, 0), (503, True, 1), (503, False, 0)], ids=str
)
def test_failures_are_reported_and_strict_ends_with_1(
    status: int, strict: bool, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        if len(server.seen) == 3:
            await reply.plain(status, {"error": {"message": "come later"}})
        else:
            await answer_rightly(seen, reply)

    flags = [
        "--concurrency",
        "1",
        "--requests",
        "4",
        "--out",
        str(tmp_path),
        *(["--strict"] if strict else []),
    ]
    with ScriptedServer(script) as server:
        assert bench(server, *flags) == code
    shown = capsys.readouterr().out
    assert "3 of 4 requests answered correctly" in shown
    assert ("refused with 429: 1" in shown) is (status == 429)
    assert ("http 503: 1, the first is request 1: come later" in shown) is (status == 503)
    assert "count correct answers only" in shown


def test_a_run_without_a_right_answer_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await reply.plain(429, {"error": "busy"})

    with ScriptedServer(script) as server:
        assert bench(server, "--rate", "500", "--requests", "4", "--out", str(tmp_path)) == 1
    assert "refused with 429: 4" in capsys.readouterr().out
    assert (tmp_path / "bench_serve.png").exists()


def test_a_server_that_cannot_answer_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    async def script(seen: Seen, reply: Reply) -> None:
        await reply.plain(404, {"error": {"message": "no model x"}})

    with ScriptedServer(script) as server:
        assert bench(server, "--rate", "1", "--model", "x") == 1
        assert capsys.readouterr().err.strip() == f"disagg: {server.url}/completions: http 404, no model x"
        bare = server.url.removesuffix("/v1")
        assert run(["bench", "serve", "--url", bare, "--rate", "1", "--model", "x"]) == 1
        assert "does --url end in /v1?" in capsys.readouterr().err
    assert len(server.seen) == 2  # nothing was sent after the first


def test_the_key_is_the_first_line_of_its_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys"
    path.write_text("secret-1\nsecret-2\n")
    with ScriptedServer() as server:
        flags = ("--api-key-file", str(path), "--concurrency", "1", "--requests", "1", "--json")
        assert bench(server, *flags) == 0
    assert {one.headers["authorization"] for one in server.seen} == {"Bearer secret-1"}
    assert "secret" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "either --rate"),
        (["--rate", "1", "--concurrency", "2"], "either --rate"),
        (["--rate", "0"], "--rate 0: give a number above 0"),
        (["--rate", "inf"], "--rate inf"),
        (["--rate", "1", "--slo-itl-s", "-1"], "--slo-itl-s -1"),
        (["--rate", "1", "--requests", "1", "--duration-s", "1"], "either --requests"),
        (["--rate", "1e-9", "--duration-s", "1"], "no request arrives within"),
        (["--concurrency", "1", "--arrivals", "fixed"], "--arrivals fixed needs --rate"),
        (["--rate", "1", "--input-tokens", "many"], "--input-tokens many"),
        (["--rate", "1", "--token-ids", "9-3"], "--token-ids 9-3"),
        (["--rate", "1", "--extra-body", "{"], "--extra-body {: not a JSON object"),
        (["--rate", "1", "--extra-body", '{"stream": false}'], "--extra-body: stream cannot be set"),
        (["--rate", "1", "--url", "127.0.0.1:8000"], "--url 127.0.0.1:8000"),
        (["--rate", "1", "--url", "http://a:b@host/v1"], "--url"),
        (["--rate", "1", "--url", "http://[::1/v1"], "--url"),
        (["--rate", "1", "--url", "http://host:port/v1"], "--url"),
        (["--rate", "1", "--api-key-file", "/dev/null"], "its first line must be the key"),
        (["--rate", "1", "--api-key-file", "no such file"], "cannot be read"),
    ],
)
def test_wrong_flags_are_one_line(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", *flags]) == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert len(shown.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("limits", "wanted"), [((1024, 4096), (4096, 4096)), ((1024, -1), (65536, -1)), ((-1, -1), None)]
)
def test_as_many_files_as_allowed(
    limits: tuple[int, int], wanted: tuple[int, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr("resource.getrlimit", lambda kind: limits)
    monkeypatch.setattr("resource.setrlimit", lambda kind, value: calls.append(value))
    cli_bench_serve.allow_open_files()
    assert calls == ([] if wanted is None else [wanted])
