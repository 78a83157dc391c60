"""What `disagg top` prints, and what it says when there is nothing to print."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from pathlib import Path

import httpx
import msgspec
import pytest
from api_server import ApiServer
from msgspec.structs import replace
from rich.console import Console
from scripted_server import ScriptedServer
from status_pictures import service, with_states, with_tiers

from disagg.cli import app as cli
from disagg.core.status import ServiceStatus
from disagg.top.client import StatusClient
from disagg.top.view import picture
from disagg.top.watch import looks
from disagg.top.words import count_words, rate_words, time_words

ROOT = Path(__file__).resolve().parents[2]


def lines(
    *pictures: ServiceStatus, width: int = 140, height: int | None = None, trouble: str = ""
) -> list[str]:
    console = Console(width=width, file=io.StringIO())
    console.print(picture(pictures, width, height, trouble))
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


def row(shown: list[str], start: str) -> list[str]:
    [found] = [line for line in shown if line.strip().startswith(start)]
    return found.split()


def test_a_picture_has_totals_groups_flows_and_requests() -> None:
    shown = lines(service(100.0), service(102.0))
    assert shown[:4] == [
        "disagg 0.1.0  tiny  up 102 s  ready",
        "running 5/64  queued 2/256  refused 3  errors 1  aborted 2",
        "TTFT p50 120 ms p99 900 ms  ITL p50 11 ms p99 42 ms",
        "prompts 800 tok/s  answers 120 tok/s  KV cache 12 MB/s",
    ]
    assert " ".join(row(shown, "decode-2  ")) == "decode-2 up 1 512 4 0 120 40% 19% 0% 19% 8%"
    assert len([line for line in shown if "3 MB/s" in line and "12 MB/s  292 MiB" in line]) == 4
    said = [" ".join(row(shown, f"cmpl-{number} ")) for number in (9, 8, 7, 6, 5)]
    assert said == [
        "cmpl-9 runs - - 30 0 - - - 400 ms",
        "cmpl-8 runs prefill decode-2 50 ms 30 ms 512 9 400 ms 1 MiB 200 ms 1 s",
        "cmpl-7 error peer_lost prefill decode-2 50 ms 30 ms 512 0 - 1 MiB 200 ms 700 ms",
        "cmpl-6 aborted prefill decode-2 50 ms 30 ms 512 20 400 ms 1 MiB 200 ms 900 ms",
        "cmpl-5 length prefill decode-2 50 ms 30 ms 512 64 400 ms 1 MiB 200 ms 1.5 s",
    ]


def test_a_narrow_terminal_cuts_nothing() -> None:
    shown = lines(service(100.0), service(102.0), width=80)
    assert "…" not in "".join(shown)
    assert " ".join(row(shown, "cmpl-5 ")) == "cmpl-5 length 512 64 400 ms 1 MiB 200 ms 1.5 s"


def test_states_of_groups() -> None:
    now = service(10.0)
    prefill, decode, second = now.groups
    groups = (replace(prefill, broken="rank 1 is gone"), decode, replace(second, ranks=()))
    shown = lines(replace(now, groups=groups, draining=("decode",)))
    assert "broken: rank 1 is gone" in " ".join(row(shown, "prefill  "))
    assert row(shown, "decode  ")[1] == "drains"
    assert row(shown, "decode-2  ")[1] == "silent"
    shown = lines(replace(now, draining=("decode",), suspected=("decode", "prefill")))
    assert [row(shown, name)[1] for name in ("prefill  ", "decode  ")] == ["silent"] * 2


def test_states_of_recurrent_layers() -> None:
    now = service(10.0)
    assert not any("states" in line for line in lines(now))
    prefill, decode, second = now.groups
    only_rows = replace(with_states(decode), cached_state_slots=0, cached_states=0)
    shown = lines(replace(now, groups=(with_states(prefill), only_rows, second)))
    assert " ".join(row(shown, "group  ")).endswith("buffers states")
    assert " ".join(row(shown, "prefill  ")).endswith(" 20/40 + 8/32")
    assert row(shown, "decode  ")[-1] == "20/40"
    assert row(shown, "decode-2  ")[-1] == "-"
    narrow = lines(replace(now, groups=(with_states(prefill), only_rows, second)), width=80)
    assert "…" not in "".join(narrow)
    assert [row(narrow, name)[-1] for name in ("prefill  ", "decode  ")] == ["50%+25%", "50%"]


def test_lower_tiers_of_the_prefix_cache() -> None:
    assert not any("Prefix cache" in line for line in lines(service(100.0), service(102.0)))
    pictures = []
    for at_s in (100.0, 102.0):
        now = service(at_s)
        prefill, *others = now.groups
        pictures.append(replace(now, groups=(with_tiers(prefill, at_s), *others)))
    shown = lines(*pictures)
    at = next(number for number, line in enumerate(shown) if line.strip() == "Prefix cache")
    # A token has 2 x 1 GiB / 16384 bytes; 0.35 s of each second are saved, less 0.03 s for loads and fetches.
    assert shown[at + 3].split() == [
        "prefill",
        "50%",
        "12%",
        "25%",
        "19.7",
        "MB/s",
        "10",
        "25%",
        "2.55",
        "k",
        "3",
        "7",
        "20",
        "32.6",
        "s",
    ]
    narrow = lines(*pictures, width=80)
    assert "…" not in "".join(narrow)
    [row_of_tiers] = [line for line in narrow if line.strip().startswith("prefill") and "19.7 MB/s" in line]
    assert " ".join(row_of_tiers.split()) == "prefill 50% 12% 25% 19.7 MB/s 10 25% 32.6 s"


def test_nothing_is_up() -> None:
    shown = lines(replace(service(1.0, (), ()), ready="no decode and no prefill group is up", recent=()))
    assert shown[-1] == "no group is up"
    assert "no decode and no prefill group is up" in shown[0]


def test_many_flows_are_summed_and_a_low_terminal_shows_fewer_requests() -> None:
    many = service(10.0, (8,), (8,)), service(12.0, (8,), (8,))
    assert (
        len([line for line in lines(*many) if line.split()[:2] == ["prefill", "decode"] and "B/s" in line])
        == 2
    )
    two = service(10.0), service(12.0)
    assert len([line for line in lines(*two) if line.strip().startswith("cmpl")]) == 6
    assert len([line for line in lines(*two, height=25) if line.strip().startswith("cmpl")]) == 3


def test_names_command_no_terminal() -> None:
    evil = "\x1b[2J[red]x[/red]\n"
    now = service(10.0)
    groups = tuple(replace(group, name=evil) for group in now.groups)
    recent = (replace(now.recent[0], id=evil, prefill=evil),)
    shown = "\n".join(lines(replace(now, model=evil, groups=groups, recent=recent)))
    assert "\x1b" not in shown
    assert "[red]x[/red]" in shown, "and no style is read out of them"


@pytest.mark.parametrize(
    ("value", "said"),
    [(0, "-"), (999, "999 B/s"), (999.6, "1 kB/s"), (12_345_678, "12.3 MB/s"), (3.7e11, "370 GB/s")],
)
def test_rates_in_words(value: float, said: str) -> None:
    assert rate_words(value) == said


def test_counts_and_times_in_words() -> None:
    assert [count_words(value) for value in (0, 7.25, 999.9, 12_345)] == ["0", "7.25", "1 k", "12.3 k"]
    times = (0, 0.00012, 0.0421, 0.9996, 61.5, 150, 7500)
    assert [time_words(one) for one in times] == [
        "-",
        "0.12 ms",
        "42.1 ms",
        "1 s",
        "61.5 s",
        "2 min",
        "2 h 05 min",
    ]


def test_once_and_json(status_server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["top", "--url", status_server.url, "--once", "--interval-s", "0.1"]) == 0
    assert "decode-2" in capsys.readouterr().out
    assert cli.run(["top", "--url", status_server.url, "--json"]) == 0
    assert msgspec.json.decode(capsys.readouterr().out, type=ServiceStatus) == service(10.0)


def test_the_view_continues_after_errors(status_server: ScriptedServer) -> None:
    with StatusClient(status_server.url, None) as client:
        seen = looks(client, [client.status()], lambda: None)
        status_server.models = msgspec.to_builtins(service(11.0))
        pictures, trouble = next(seen)
        assert ([one.uptime_s for one in pictures], trouble) == ([10, 11], "")
        status_server.models = ["nothing"]
        pictures, trouble = next(seen)
        assert len(pictures) == 2, "the last picture stays"
        assert "not the status of a disagg server" in trouble
        assert trouble in lines(*pictures, trouble=trouble)[0]
        status_server.models = msgspec.to_builtins(service(12.0))
        assert next(seen)[1] == ""


def test_what_cannot_be_watched_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "key").write_text("wrong\n")
    with ApiServer("secret") as server:
        for flags, said, code in [
            (["--url", server.url], "requires an API key: give a key with --api-key-file", 1),
            (["--url", server.url, "--api-key-file", str(tmp_path / "key")], "the given key is wrong", 1),
            (["--url", f"{server.url}/nowhere", "--api-key-file", str(tmp_path / "key")], "API key", 1),
            (["--url", "ftp://x"], "give the base URL of the server, such as http://", 2),
            (["--interval-s", "0"], "give 0.1 to 3600 seconds", 2),
            (["--api-key-file", "/nowhere"], "--api-key-file /nowhere cannot be read", 2),
        ]:
            assert cli.run(["top", *flags]) == code
            error = capsys.readouterr().err
            assert said in error
            assert error.count("\n") == 1
        gone = server.url
    assert cli.run(["top", "--url", gone, "--once"]) == 1
    assert re.fullmatch(rf"disagg: {gone}/status cannot be reached: .+\n", capsys.readouterr().err)


def test_another_server_is_an_error(
    status_server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    status_server.models = {"object": "list"}
    assert cli.run(["top", "--url", status_server.url]) == 1
    assert "is not the status of a disagg server" in capsys.readouterr().err
    with ApiServer() as server:
        assert httpx.get(f"{server.url}/nowhere/status", trust_env=False).status_code == 404
        assert cli.run(["top", "--url", f"{server.url}/nowhere"]) == 1
    assert "answered 404: is a disagg server there?" in capsys.readouterr().err


def test_help_is_light() -> None:
    code = (
        "import sys; from disagg.cli import app as cli; assert cli.run(['top', '--help']) == 0; "
        "print([name for name in ('torch', 'rich', 'httpx', 'msgspec') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] in ("[]", "['msgspec']")
    assert "--interval-s" in done.stdout
