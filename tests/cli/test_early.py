"""Input that cannot be served is refused before torch, transformers and Ray are imported, which takes seconds."""

from __future__ import annotations

import json
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from light_commands import LightCommands, light_commands

Change = Callable[[Path], object]


def weights(data: bytes) -> bytes:
    """A safetensors file of one float32 tensor with `data`."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    return len(header).to_bytes(8, "little") + header + data


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder that passes all checks which read neither torch nor transformers."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "model.safetensors").write_bytes(weights(b"1234"))
    return folder


@pytest.fixture(scope="module")
def commands() -> Iterator[LightCommands]:
    with light_commands() as found:
        yield found


Refused = Callable[[list[str]], str]


@pytest.fixture
def refused(commands: LightCommands, tmp_path: Path) -> Refused:
    """Returns the one line with which a command ends; exit code 2, nothing heavy imported."""

    def run(arguments: list[str]) -> str:
        code, heavy, stderr = commands.run(arguments, tmp_path)
        assert (code, heavy) == (2, []), stderr
        [line] = stderr.splitlines()
        return line

    return run


COMMANDS = [
    "serve",
    "serve --workers 2",
    "launch",
    "generate hello",
    "demo",
    "plan --prefill-tp 1 --decode-tp 1",
    "bench handoff",
    "bench agreement",
    "bench chaos",
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_model_that_is_not_there(command: str, refused: Refused) -> None:
    assert "no such model directory: /nowhere" in refused([*command.split(), "--model", "/nowhere"])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json"),
        (lambda model: (model / "config.json").write_text("{"), "config.json cannot be used"),
        (lambda model: (model / "model.safetensors").write_bytes(b""), "model.safetensors has no complete"),
        (lambda model: (model / "model.safetensors").write_bytes(weights(b"1")), "model.safetensors has"),
        (lambda model: (model / "model.safetensors").unlink(), "has no weights"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text(
                '{"weight_map": {"a": "gone"}}'
            ),
            "model.safetensors.index.json names the missing file gone",
        ),
        (
            lambda model: (model / "model.safetensors").rename(model / "pytorch_model.bin"),
            "pytorch_model.bin is no weight file of torch",
        ),
    ],
)
def test_a_model_that_is_broken(change: Change, said: str, model: Path, refused: Refused) -> None:
    change(model)
    line = refused(["serve", str(model)])
    assert str(model) in line
    assert said in line


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("serve --random-init tiny-llamma", "unknown architecture 'tiny-llamma'"),
        ("serve org/model", "not complete in the cache"),
        ("serve org/model --revision v1", "org/model at revision v1 is no folder"),
        (
            "serve --revision v1",
            "model.revision = 'v1' is not allowed; it must be left out without model.path",
        ),
        ("serve --tensor-parallel-size 2", "--prefill-tp"),
        ("serve --prefill-tp 0", "it must be at least 1"),
        ("serve --config nowhere.toml", "cannot be read"),
        ("serve --api-key-file nowhere", "cannot read the API keys in nowhere"),
        ("serve --host 0.0.0.0", "--api-key-file"),
        ("serve --host 192.0.2.1 --set api.allow_no_key=true", "cannot listen on 192.0.2.1"),
        ("serve --set control.key_file=nowhere", "cannot read the key file nowhere"),
        ("launch --set control.key_file=nowhere", "cannot read the key file nowhere"),
        ("generate a --set control.key_file=nowhere", "cannot read the key file nowhere"),
        ("serve --join 127.0.0.1:5570", "write tcp://HOST:PORT"),
        (
            "serve --random-init tiny-llama --join tcp://127.0.0.1:9",
            "there are no keys for tcp://127.0.0.1:9",
        ),
    ],
)
def test_other_input(arguments: str, said: str, refused: Refused) -> None:
    assert said in refused(arguments.split())


@pytest.mark.parametrize(
    "arguments",
    [
        "serve --port {}",
        "serve --port 0 --set control.router_port={}",
        "launch --set control.directory_port={}",
        "generate a --set control.router_port={}",
    ],
)
def test_a_port_in_use(arguments: str, model: Path, refused: Refused) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        line = refused([*arguments.format(port).split(), "--model", str(model)])
    assert str(port) in line


def test_the_fixture_is_no_broken_model(model: Path, tmp_path: Path, refused: Refused) -> None:
    """The last check refuses it here, so none refuses the folder."""
    shutil.copytree(model, tmp_path / "other")
    line = refused(["serve", "other", "--host", "192.0.2.1", "--set", "api.allow_no_key=true"])
    assert "cannot listen on 192.0.2.1" in line
