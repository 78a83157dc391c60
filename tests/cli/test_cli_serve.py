"""`disagg serve`'s flags, and that the server is imported only by it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from disagg.cli import app as cli
from disagg.core.config.read import Config

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replaces `disagg.commands.serve`; returns the list of its configurations."""
    configs: list[Config] = []
    module = ModuleType("disagg.commands.serve")
    module.run_serve = configs.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disagg.commands.serve", module)
    monkeypatch.setattr("disagg.cli.serve.check_serve", lambda config, directory: None)
    for name in [name for name in os.environ if name.startswith("DISAGG_")]:
        monkeypatch.delenv(name)
    return configs


def test_serve_needs_no_flags(served: list[Config]) -> None:
    assert cli.run(["serve"]) == 0
    assert served == [Config()]
    assert served[0].api.host == "127.0.0.1", "only this machine by default"


def test_serve_flags(served: list[Config], tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[api]\nmax_running = 3\nport = 1\n")
    flags = (
        f"serve --model /m --prefill-tp 2 --decode-tp 3 --device cpu --config {path} --host 0.0.0.0 --port 9 "
        f"--api-key-file /k --model-name me --set api.max_queued=4 --transport ucx"
    )
    assert cli.run(flags.split()) == 0
    [config] = served
    assert (config.model.path, config.prefill.tp, config.decode.tp) == ("/m", 2, 3)
    assert (config.api.host, config.api.port) == ("0.0.0.0", 9), "a flag beats the file"
    assert (config.api.key_file, config.api.model_name) == ("/k", "me")
    assert (config.api.max_running, config.api.max_queued) == (3, 4)
    assert not config.transport.peer_memory


def test_serve_colocated(served: list[Config], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        cli.run(
            ["serve", "--colocated", "--tp", "2", "--groups", "3", "--chunk-tokens", "64", "--device", "cpu"]
        )
        == 0
    )
    path = tmp_path / "a.toml"
    path.write_text('[cluster]\nmode = "colocated"\n')
    assert cli.run(f"serve --config {path} --tp 4".split()) == 0
    by_flags, by_file = served
    group = by_flags.colocated
    assert (group.tp, group.groups, group.chunk_tokens, group.device) == (2, 3, 64, "cpu")
    assert list(by_flags.kinds) == list(by_file.kinds) == ["colocated"]
    assert list(Config().kinds) == ["prefill", "decode"]
    for flags, said in (
        ("--tp 2", "--tp is for colocated groups, and cluster.mode is split: give --colocated"),
        ("--colocated --decode-tp 1", "--decode-tp is for split groups, and cluster.mode is colocated"),
        ("--colocated --transport ucx", "--transport is for split groups"),
        ("--colocated --groups 0", "flag colocated.groups: colocated.groups = 0 is not allowed"),
        (
            "--set cluster.mode=both",
            "cluster.mode = 'both' is not allowed; it must be one of split, colocated",
        ),
    ):
        assert cli.run(["serve", *flags.split()]) == 2
        error = capsys.readouterr().err
        assert said in error
        assert len(error.splitlines()) == 1
    assert len(served) == 2


def test_help_imports_no_server() -> None:
    code = (
        "import sys; from disagg.cli import app as cli; assert cli.run(['serve', '--help']) == 0; "
        "heavy = ('torch', 'ray', 'starlette', 'uvicorn', 'prometheus_client', 'rich'); "
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
    assert "--api-key-file" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--random-init tiny-llama --api-key-file /nowhere", "cannot read the API keys in /nowhere"),
        (
            "--random-init tiny-llama --host 999.1.1.1 --set api.allow_no_key=true",
            "api.host = '999.1.1.1' is not an address of this machine",
        ),
        ("--model /nowhere", "no such model directory: /nowhere"),
    ],
)
def test_what_cannot_be_served_is_one_line_before_anything_starts(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "--port", "0", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("disagg: ") == 1
