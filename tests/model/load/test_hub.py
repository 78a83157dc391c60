"""Models by name: downloads, revisions, tokens, and the cache without a network, with a hub of our own."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_hub import NAME, FakeHub, serving
from huggingface_hub import constants
from huggingface_hub.utils import enable_progress_bars

from disagg.commands.early import check_model, pinned
from disagg.commands.router_server import model_facts, served_model
from disagg.core.config.read import Config, ModelConfig
from disagg.core.errors import ConfigError
from disagg.model.load.hub import checkpoint_folder, download, is_hub_name
from disagg.model.load.source import make_source
from disagg.model.load.tiny import make_tiny_checkpoint

OLD, NEW = "a" * 40, "b" * 40
FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(
        tmp_path_factory.mktemp("hub") / "model", layers=1, hidden=48, head_dim=8, mlp=48
    )


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    """Two commits; the newer one has files that no server needs."""
    old, new = (Path(shutil.copytree(checkpoint, tmp_path / commit)) for commit in (OLD, NEW))
    (old / "config.json").write_text((old / "config.json").read_text() + "\n")
    (new / "original").mkdir()
    for name in (
        "modeling.py",
        "README.md",
        "pytorch_model.bin",
        "consolidated.safetensors",
        "original/a.json",
    ):
        (new / name).write_text("unwanted")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HF_TOKEN", raising=False)
    enable_progress_bars()  # `disagg demo`, in a test before, turns them off
    with serving(
        FakeHub({OLD: old, NEW: new}, {"main": NEW, "v1": OLD}), tmp_path / "cache", monkeypatch
    ) as one:
        yield one


def config(**fields: str) -> Config:
    return Config(model=ModelConfig(path=NAME, **fields))


def test_only_the_needed_files_are_downloaded_and_only_once(
    hub: FakeHub, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = download(NAME, None)
    lines = capsys.readouterr().err.splitlines()
    assert lines, "a line each 5 s, without a terminal"
    assert all(re.fullmatch(rf"downloading {NAME}: \d+% of [\d.]+kB", line) for line in lines), lines
    assert folder.name == NEW
    assert {file.name for file in folder.iterdir()} - {"chat_template.jinja"} == FILES
    assert len(hub.sent) == len(set(hub.sent))
    hub.requests.clear()
    assert checkpoint_folder(NAME, NEW) == folder
    assert hub.requests == [], "ranks take the cached snapshot without a request"


def test_a_revision_and_the_commit_of_the_branch(hub: FakeHub) -> None:
    assert download(NAME, "v1").name == OLD
    assert pinned(config(revision="v1")).model.revision == OLD
    check_model(config().model)
    assert pinned(config()).model.revision == NEW
    hub.refs["main"] = OLD
    assert pinned(config()).model.revision == NEW, "the cache"
    check_model(config().model)
    assert pinned(config()).model.revision == OLD, "a start asks the hub"


def test_weights_of_torch_where_there_are_no_others(hub: FakeHub) -> None:
    (hub.folders[NEW] / "model.safetensors").rename(hub.folders[NEW] / "pytorch_model.bin")
    folder = download(NAME, None)
    assert (folder / "pytorch_model.bin").is_file()
    assert checkpoint_folder(NAME, None) == folder


def test_without_a_network_the_cache_is_used(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download(NAME, None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.requests.clear()
    check_model(config().model)
    assert make_source(config()).directory == folder
    assert hub.requests == []
    with pytest.raises(ConfigError, match=r"org/other is no folder .* HF_HUB_OFFLINE is set"):
        download("org/other", None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"not complete in the cache .*HF_HUB_OFFLINE"):
        check_model(config().model)


def test_the_hub_that_cannot_be_reached(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = download(NAME, None)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    assert download(NAME, None) == folder
    with pytest.raises(
        ConfigError, match="org/other is no folder on this machine, and the hub cannot be reached: "
    ):
        download("org/other", None)


def test_what_the_hub_refuses(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="a--b/c cannot be downloaded: "):
        checkpoint_folder("a--b/c", None)
    with pytest.raises(ConfigError, match=f"{NAME} has no revision v9: give a branch, a tag or a commit"):
        download(NAME, "v9")
    with pytest.raises(
        ConfigError, match=r"org/other is no folder on this machine, and http://\S+ has no such model"
    ):
        download("org/other", None)
    hub.token = "hf_secret"
    with pytest.raises(ConfigError, match="a private model needs HF_TOKEN"):
        download(NAME, None)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert download(NAME, None).name == NEW


def test_a_folder_has_precedence_and_no_revision(hub: FakeHub, checkpoint: Path) -> None:
    assert is_hub_name(NAME)
    assert not any(map(is_hub_name, ("tiny", "/org/tiny", "./org/tiny", "../tiny", "a/b/c", "~/x", "org/")))
    shutil.copytree(checkpoint, NAME)
    assert checkpoint_folder(NAME, None) == Path(NAME)
    assert pinned(config()) == config()
    with pytest.raises(ConfigError, match="--revision v1: org/tiny is a folder"):
        check_model(config(revision="v1").model)


def test_a_cut_download_is_refused_by_its_file(hub: FakeHub) -> None:
    weights = hub.folders[NEW] / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(ConfigError, match=r"model.safetensors has \d+ bytes instead of"):
        check_model(config().model)


def test_the_api_has_the_name_of_the_hub(hub: FakeHub) -> None:
    check_model(config().model)
    snapshot = str(checkpoint_folder(NAME, None))
    for one in (pinned(config()), Config(model=ModelConfig(path=snapshot))):
        model = served_model(one, model_facts(one))
        model.close()
        assert model.name == NAME
