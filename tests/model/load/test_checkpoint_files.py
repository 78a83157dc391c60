"""Broken checkpoints: each is one ConfigError that names the file, whatever a library makes of it."""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from broken_checkpoints import (
    AT_BUILD,
    AT_SOURCE,
    AT_SPEC,
    AT_TOKENIZER,
    TORCH_WEIGHTS,
    Break,
    split,
    torch_file,
)

from disagg.core.config.section import FieldError
from disagg.core.errors import ConfigError, DisaggError, error_classes
from disagg.model.collective.base import SingleCollective
from disagg.model.load.build import build_model
from disagg.model.load.checkpoint_files import read_json_object, reading, require_checkpoint, weight_files
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.model.load.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy that may be broken."""
    return Path(shutil.copytree(whole, tmp_path / "model"))


def one_line(raised: pytest.ExceptionInfo[ConfigError], said: str) -> None:
    text = str(raised.value)
    assert said in text
    assert len(text) < 600, "short enough to read"
    assert str(pickle.loads(pickle.dumps(raised.value))) == text, "and crosses processes"


@pytest.mark.parametrize(("broken", "said"), AT_SOURCE.values(), ids=AT_SOURCE)
def test_the_source_refuses(folder: Path, broken: Break, said: str) -> None:
    broken(folder)
    with pytest.raises(ConfigError) as raised:
        ModelSource.from_directory(folder)
    one_line(raised, said)
    assert str(folder) in str(raised.value)


@pytest.mark.parametrize(("broken", "said"), AT_SPEC.values(), ids=AT_SPEC)
def test_the_spec_refuses(folder: Path, broken: Break, said: str) -> None:
    broken(folder)
    source = ModelSource.from_directory(folder)
    with pytest.raises(ConfigError) as raised:
        source.spec(torch.float32)
    one_line(raised, said)


@pytest.mark.parametrize(("broken", "said"), AT_TOKENIZER.values(), ids=AT_TOKENIZER)
def test_the_tokenizer_is_refused(folder: Path, broken: Break, said: str) -> None:
    broken(folder)
    source = ModelSource.from_directory(folder)
    with pytest.raises(ConfigError) as raised:
        load_tokenizer(source)
    one_line(raised, said)


@pytest.mark.parametrize(("broken", "said"), AT_BUILD.values(), ids=AT_BUILD)
def test_the_model_is_not_built(folder: Path, broken: Break, said: str) -> None:
    broken(folder)
    source = ModelSource.from_directory(folder)
    spec = source.spec(torch.float32)
    with pytest.raises(ConfigError) as raised:
        build_model(source, spec, SingleCollective(), torch.device("cpu"), torch.float32)
    one_line(raised, said)


def test_a_file_that_breaks_after_the_check_is_one_line_too(folder: Path) -> None:
    source = ModelSource.from_directory(folder)
    [file] = weight_files(folder)
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        source.weights({"model.embed_tokens.weight"})


def test_a_whole_checkpoint_in_shards_is_taken(folder: Path) -> None:
    split(folder)
    source = ModelSource.from_directory(folder)
    spec = source.spec(torch.float32)
    build_model(source, spec, SingleCollective(), torch.device("cpu"), torch.float32)
    assert load_tokenizer(source)("hello")["input_ids"]


def test_a_whole_checkpoint_of_torch_is_taken(folder: Path) -> None:
    torch_file(folder)
    assert [file.name for file in weight_files(folder)] == [TORCH_WEIGHTS]


@pytest.mark.parametrize("name", ["", "config.json", "model.safetensors"])
def test_what_the_user_may_not_read_is_named(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may read everything, so the system's answer is replaced."""
    denied, stat = folder / name, Path.stat

    def denying(path: Path, **more: bool) -> os.stat_result:
        if path == denied:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **more)

    monkeypatch.setattr(Path, "stat", denying)
    monkeypatch.setattr(Path, "is_dir", lambda path: bool(path.stat()))
    monkeypatch.setattr(Path, "is_file", lambda path: bool(path.stat()))
    with pytest.raises(ConfigError) as raised:
        require_checkpoint(folder)
    one_line(raised, f"{denied} cannot be read by this user")


def test_infinity_is_json_enough(tmp_path: Path) -> None:
    """Mamba 2's checkpoints have `"time_step_limit": [0.0, Infinity]`."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"limit": float("inf")}))
    assert read_json_object(path) == {"limit": float("inf")}


def test_our_errors_and_the_lack_of_memory_pass(tmp_path: Path) -> None:
    for error in (ConfigError("ours"), MemoryError()):
        with pytest.raises(type(error)) as raised, reading(tmp_path):
            raise error
        assert raised.value is error


@pytest.mark.parametrize("cls", [*error_classes().values(), FieldError], ids=lambda cls: str(cls.__name__))
def test_every_error_crosses_processes(cls: type[DisaggError]) -> None:
    made = cls("said") if cls is not FieldError else FieldError("field", 3, "less")
    back = pickle.loads(pickle.dumps(made))
    assert (type(back), str(back)) == (type(made), str(made))
