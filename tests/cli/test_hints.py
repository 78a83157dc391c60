"""What the command line answers to flags of other servers, to mistyped flags, and to `-h` and `--version`."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from disagg.cli import app as cli
from disagg.cli.hints import OTHER_SERVERS, advice, flags_of_commands
from disagg.core.config.read import Config, load_config

REPLACED = [
    ("serve --tensor-parallel-size 2", "--prefill-tp and --decode-tp"),
    ("serve --tensor-parallel-size=2", "--prefill-tp and --decode-tp"),
    ("serve -tp 2", "--prefill-tp and --decode-tp"),
    ("serve --context-length 4096", "--max-context-tokens N"),
    ("serve --max-modl-len 4096", "did you mean --max-model-len?"),
    ("serve --hf-token x", "HF_TOKEN"),
    ("serve --gpu-memory-utilization 0.9", "--set prefill.mem_fraction=0.88 --set decode.mem_fraction=0.88"),
    ("serve --api-key x", "--api-key-file FILE"),
    ("serve --api_key_file x", "write --api-key-file"),
    ("serve --tensor-paralel-size 2", "--prefill-tp and --decode-tp"),
    ("serve --prefil-tp 2", "did you mean --prefill-tp?"),
    ("serve --modle x", "did you mean --model?"),
    ("serve --hots x", "did you mean --host?"),
    ("serve --watermark 0.1", "--set decode.watermark=VALUE"),
    ("serve --temperature 0", "is a flag of `disagg generate`"),
    ("serve --enable-auto-tool-choice", "--set api.tool_parser=none"),
    ("serve --reasoning-parser qwen3", "--set api.reasoning_parser=none"),
    ("launch --host 0.0.0.0", "--set control.host=VALUE"),
    ("generate --max-model-len 4096", "--max-context-tokens N of serve and launch"),
]


@pytest.mark.parametrize(("words", "said"), REPLACED)
def test_an_unknown_flag_names_the_right_one(
    words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(words.split()) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert said in error
    assert "Possible options" not in error


def test_a_flag_like_no_other_gets_no_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["serve", "--frobnicate"]) == 2
    assert capsys.readouterr().err == "disagg: No such option: --frobnicate (see disagg serve --help)\n"


@pytest.mark.parametrize("flag", OTHER_SERVERS)
def test_advice_names_flags_and_settings_that_exist(flag: str) -> None:
    text = advice(flag, [], {})
    words = [word.strip("`;,():") for word in text.split()]
    own = flags_of_commands(cli.command_line())
    known = {one for command in ("serve", "launch") for one in own[command]} | {"--load-format"}
    assert [word for word in words if word.startswith("--") and word not in known] == []
    for key, value in (word.split("=") for word in words if "=" in word):
        load_config(overrides={key: "16" if value == "N" else value})


@pytest.mark.parametrize("flags", ["-h", "--help", "serve -h", "bench serve -h", "demo --help"])
def test_help_has_a_short_flag(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(flags.split()) == 0
    assert "-h, --help" in capsys.readouterr().out


def test_the_version_is_a_flag_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["--version"]) == 0
    assert cli.run(["version"]) == 0
    assert capsys.readouterr().out == "disagg 0.1.0\n" * 2


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """Replaces `disagg.commands.serve`; returns the list of its configurations."""
    configs: list[Config] = []
    module = ModuleType("disagg.commands.serve")
    module.run_serve = configs.append  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "disagg.commands.serve", module)
    monkeypatch.setattr("disagg.cli.serve.check_serve", lambda config, directory: None)
    monkeypatch.setattr("disagg.cli.serve.pinned", lambda config: config)
    return configs


def test_the_model_may_be_positional(served: list[Config], tmp_path: Path) -> None:
    assert cli.run(["serve", "/models/a", "--port", "9"]) == 0
    assert cli.run(["serve", "--port", "9", "--model", "/models/a"]) == 0
    assert served[0] == served[1]
    assert served[0].model.path == "/models/a"


@pytest.mark.parametrize("other", ["--model b", "--random-init tiny-llama"])
def test_the_model_is_given_once(
    served: list[Config], other: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["serve", "a", *other.split()]) == 2
    assert f"a and {other.split()[0]}: give the model once" in capsys.readouterr().err
    assert served == []


@pytest.mark.parametrize(
    ("name", "dtype"), [("half", "float16"), ("bfloat16", "bfloat16"), ("float", "float32")]
)
def test_names_of_types_of_other_servers(served: list[Config], name: str, dtype: str) -> None:
    assert cli.run(["serve", "--dtype", name]) == 0
    assert served[0].model.dtype == dtype


def test_names_of_flags_of_other_servers(served: list[Config]) -> None:
    flags = "serve org/model --revision v1 --max-model-len 4096 --served-model-name chat --colocated"
    assert cli.run(flags.split()) == 0
    [config] = served
    assert (config.model.path, config.model.revision) == ("org/model", "v1")
    assert config.colocated.max_context_tokens == config.decode.max_context_tokens == 4096
    assert config.api.model_name == "chat"
