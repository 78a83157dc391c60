"""Which keys a process uses, and where processes that are started one by one find those of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from disagg.cluster.keys import join_keys, launch_keys, own_keys, published, run_file
from disagg.core.config.read import ControlConfig
from disagg.core.errors import ConfigError
from transport.keys.curve import make_keys
from transport.keys.file import save_keys

DIRECTORY = "tcp://127.0.0.1:5570"


def test_a_configured_file_is_used_by_everyone(tmp_path: Path) -> None:
    keys, file = make_keys(), tmp_path / "keys.json"
    save_keys(keys, file)
    config = ControlConfig(host="10.1.2.3", key_file=str(file))
    for ring in (own_keys(config), launch_keys(config), join_keys(config, "tcp://10.1.2.4:5570", {})):
        assert ring.generations == (keys,)


def test_without_a_file_each_run_has_fresh_keys() -> None:
    config = ControlConfig()
    assert own_keys(config).generations != own_keys(config).generations
    assert len(launch_keys(config).generations) == 1


def test_without_a_file_other_hosts_are_refused() -> None:
    beyond = r"10\.1\.2\.3 is reached by other hosts, .* set control\.key_file"
    with pytest.raises(ConfigError, match=beyond):
        launch_keys(ControlConfig(host="10.1.2.3"))
    with pytest.raises(ConfigError, match=beyond):
        join_keys(ControlConfig(), "tcp://10.1.2.3:5570", {})


def test_processes_of_one_user_meet_on_one_host(tmp_path: Path) -> None:
    config, environment = ControlConfig(), {"XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"no keys for tcp://127\.0\.0\.1:5570: is `disagg launch`"):
        join_keys(config, DIRECTORY, environment)
    keys = launch_keys(config)
    with published(keys, config, DIRECTORY, environment):
        file = run_file("5570", environment)
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.parent.stat().st_mode & 0o777 == 0o700
        assert join_keys(config, DIRECTORY, environment).generations == keys.generations
        with pytest.raises(ConfigError, match="no keys"):
            join_keys(config, "tcp://127.0.0.1:5571", environment)
    assert not file.exists()


def test_the_next_run_replaces_the_keys_of_one_that_was_killed(tmp_path: Path) -> None:
    config, environment = ControlConfig(), {"XDG_CACHE_HOME": str(tmp_path)}
    file = run_file("5570", environment)
    file.parent.mkdir(parents=True)
    save_keys(make_keys(), file)
    keys = launch_keys(config)
    with published(keys, config, DIRECTORY, environment):
        assert join_keys(config, DIRECTORY, environment).generations == keys.generations


def test_a_launch_that_may_adopt_groups_has_the_keys_of_the_killed_one(tmp_path: Path) -> None:
    config, environment = ControlConfig(), {"XDG_CACHE_HOME": str(tmp_path)}
    fresh = launch_keys(config, environment)
    file = run_file("5570", environment)
    file.parent.mkdir(parents=True)
    save_keys(fresh.keys, file)
    assert launch_keys(config, environment).generations == fresh.generations
    file.write_text("cut off by the kill")
    assert launch_keys(config, environment).generations != fresh.generations


def test_a_folder_that_cannot_be_written_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "disagg").write_text("a file where the folder should be")
    with (
        pytest.raises(ConfigError, match=r"cannot make .*disagg/run"),
        published(
            launch_keys(ControlConfig()), ControlConfig(), DIRECTORY, {"XDG_CACHE_HOME": str(tmp_path)}
        ),
    ):
        pass
