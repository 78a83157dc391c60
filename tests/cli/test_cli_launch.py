"""Flags of `disagg launch`, `scale`, `roll` and `serve --join`, and what is refused before anything starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from disagg.cli import app as cli
from disagg.commands.roll import roll_request
from disagg.core.config.read import Config
from transport.control import messages as m

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Replaces the modules that the commands import; returns the list of their calls."""
    calls: list[Any] = []

    def scale(config: Config, join: str, counts: Mapping[str, int]) -> None:
        calls.append((config, join, counts))

    def roll(config: Config, join: str, request: Any, say: Any) -> None:
        calls.append((config, join, request))

    for module, names in (
        ("roll", {"run_roll": roll, "roll_request": roll_request}),
        ("launch", {"run_launch": calls.append}),
        ("scale", {"run_scale": scale}),
        ("serve", {"run_serve_joined": lambda config, join: calls.append((config, join))}),
    ):
        fake = ModuleType(f"disagg.commands.{module}")
        fake.__dict__.update(names)
        monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr("disagg.cli.launch.check_launch", lambda config: None)
    monkeypatch.setattr("disagg.cli.serve.check_serve", lambda config, directory: None)
    for name in [name for name in os.environ if name.startswith("DISAGG_")]:
        monkeypatch.delenv(name)
    return calls


def test_launch(calls: list[Any]) -> None:
    assert cli.run(["launch"]) == 0
    flags = "launch --model /m --prefill-tp 2 --ray auto --set control.host=auto --set prefill.groups=3"
    assert cli.run(flags.split()) == 0
    bare, config = calls
    assert bare == Config()
    assert (config.model.path, config.prefill.tp, config.prefill.groups) == ("/m", 2, 3)
    assert (config.cluster.ray, config.control.host) == ("auto", "auto")


def test_launch_and_serve_take_the_same_flags_for_groups(calls: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[transfer]\nlayer_groups = 7\n")
    flags = (
        f"--random-init tiny-llama --dtype float32 --prefill-tp 4 --decode-tp 3 --device cpu --config {path} "
        "--set transport.trusted_network=true --chunk-tokens 64 --prefill-page-size 32 --decode-page-size 8 "
        "--ring-bytes 64MiB --transport ucx --deterministic"
    ).split()
    assert cli.run(["launch", *flags]) == 0
    assert cli.run(["serve", *flags, "--join", "tcp://a:1"]) == 0
    [launched, (joined, _)] = calls
    assert launched == joined
    assert (launched.model.random_init, launched.model.dtype) == ("tiny-llama", "float32")
    assert launched.model.deterministic
    assert (launched.prefill.tp, launched.decode.tp, launched.decode.device) == (4, 3, "cpu")
    assert (launched.prefill.page_size, launched.decode.page_size) == (32, 8)
    assert (launched.prefill.chunk_tokens, launched.transfer.layer_groups) == (64, 7)
    assert launched.transfer.ring_bytes == 64 << 20
    assert (launched.transport.trusted_network, launched.transport.peer_memory) == (True, False)


def test_launch_colocated(calls: list[Any]) -> None:
    assert cli.run(["launch", "--colocated", "--tp", "2", "--groups", "2"]) == 0
    assert cli.run(["scale", "--join", "tcp://a:1", "colocated=3"]) == 0
    [config, (_, _, counts)] = calls
    assert (config.cluster.mode, config.colocated.ranks, config.colocated.groups) == ("colocated", 2, 2)
    assert counts == {"colocated": 3}


def test_scale(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["scale", "--join", "tcp://a:1", "decode=2", "prefill=10"]) == 0
    assert calls == [(Config(), "tcp://a:1", {"decode": 2, "prefill": 10})]
    for counts in ("decode=0", "decode=-1", "router=1", "decode", "decode=1 decode=2"):
        assert cli.run(["scale", "--join", "tcp://a:1", *counts.split()]) == 2
        assert "write prefill=2 or decode=1" in capsys.readouterr().err
    assert cli.run(["scale", "decode=1"]) == 2
    assert "--join tcp://HOST:PORT is missing" in capsys.readouterr().err
    assert len(calls) == 1


def test_roll(calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Only the given settings are sent: the others stay as they are."""
    path = tmp_path / "a.toml"
    path.write_text('[decode]\nmax_requests = 3\n[control]\nkey_file = "k"\n[transfer]\nring_bytes = 5\n')
    assert cli.run(["roll", "--join", "tcp://a:1"]) == 0
    flags = f"roll --join tcp://a:1 --config {path} --set transfer.ring_bytes=1KiB --revision b --kind decode"
    assert cli.run([*flags.split(), "--max-surge", "2", "--allow-pause"]) == 0
    [bare, (config, join, request)] = calls
    assert bare == (Config(), "tcp://a:1", m.Roll([]))
    assert (config.control.key_file, config.decode.max_requests, join) == ("k", 0, "tcp://a:1")
    origin = f"file {path}"
    assert request == m.Roll(
        [
            m.RollSetting("decode", "max_requests", 3, origin),
            m.RollSetting("control", "key_file", "k", origin),
            m.RollSetting("transfer", "ring_bytes", 1024, "flag transfer.ring_bytes"),
            m.RollSetting("model", "revision", "b", "flag model.revision"),
        ],
        ("decode",),
        2,
        allow_pause=True,
    )


def test_a_wrong_roll_sends_nothing(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    for flags, said in (
        ("", "--join tcp://HOST:PORT is missing"),
        ("--join tcp://a:1 --set decode.no=1", "unknown key no"),
        ("--join tcp://a:1 --set decode.max_requests=x", "must be a whole number"),
        ("--join tcp://a:1 --kind router", "router"),
        ("--join tcp://a:1 --max-surge -1", "--max-surge"),
    ):
        assert cli.run(["roll", *flags.split()]) == 2
        assert said in capsys.readouterr().err
    assert not calls


def test_serve_joins(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--join", "tcp://a:1", "--port", "9"]) == 0
    [(config, join)] = calls
    assert (config.api.port, join) == (9, "tcp://a:1")
    assert cli.run(["serve", "--join", "tcp://a:1", "--ray", "auto"]) == 2
    assert "--join and --ray" in capsys.readouterr().err
    assert cli.run(["serve", "--join", "tcp://a:1", "--colocated"]) == 2
    assert "--join and --colocated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (
            "launch --set control.host=192.0.2.1",
            "192.0.2.1 is reached by other hosts, so the control channel needs keys",
        ),
        ("launch --set control.key_file=/nowhere", "cannot read the key file /nowhere"),
        ("serve --join 127.0.0.1:1", "--join 127.0.0.1:1: write tcp://HOST:PORT"),
        ("serve --join tcp://192.0.2.1:1", "control.host = 127.0.0.1 cannot be reached from 192.0.2.1"),
        (
            "scale --join tcp://192.0.2.1:1 decode=1",
            "control.host = 127.0.0.1 cannot be reached from 192.0.2.1",
        ),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    command: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(command.split()) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("disagg: ") == 1


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from disagg.cli import app as cli; assert cli.run(['launch', '--help']) == 0; "
        "heavy = ('torch', 'ray', 'zmq', 'rich'); print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_server_imports_no_ray_before_it_starts_one() -> None:
    """Nor torch before it reads a model. A server that joins a cluster starts no Ray."""
    code = (
        "import sys; import disagg.commands.serve; "
        "print([name for name in ('ray', 'torch', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
