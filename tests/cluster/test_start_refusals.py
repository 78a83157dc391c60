"""What `disagg` refuses before a cluster starts, each with one line."""

from __future__ import annotations

import socket
import sys

import pytest

from disagg.cli import app as cli
from disagg.cluster.ray import local_ray
from disagg.commands.local import place
from disagg.core.config.read import load_config
from disagg.core.errors import ConfigError


def test_without_ray_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed: pip install"), local_ray(2):
        pass
    assert ConfigError.exit_code == 2


def test_a_ray_cluster_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        assert cli.run(["generate", "hi", "--device", "cpu", "--set", f"cluster.ray={address}"]) == 2
    error = capsys.readouterr().err
    assert f"disagg: no Ray cluster to join at '{address}'" in error


def test_a_port_in_use_is_one_line_before_anything_starts(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.run(["generate", "hi", "--device", "cpu", "--set", f"control.router_port={port}"]) == 2
    error = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}" in error
    assert error.count("disagg: ") == 1


@pytest.mark.parametrize(
    ("prefill", "decode", "chosen"),
    [("auto", "auto", "auto"), ("cpu", "auto", "cpu"), ("auto", "cpu", "cpu"), ("auto", "cuda", "cuda")],
)
def test_one_kind_of_device_for_both_groups(
    prefill: str, decode: str, chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def choose(
        gpus: int, prefill_tp: int | None, decode_tp: int | None, device: str, groups: tuple[int, int]
    ) -> None:
        asked.append(device)

    monkeypatch.setattr("disagg.commands.local.choose_placement", choose)
    place(load_config(None, {}, {"prefill.device": prefill, "decode.device": decode}), gpus=2)
    assert asked == [chosen]


def test_two_kinds_of_device_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"prefill.device = cuda and decode.device = cpu: both groups"):
        place(load_config(None, {}, {"prefill.device": "cuda", "decode.device": "cpu"}), gpus=2)
