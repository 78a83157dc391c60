"""Engines with vLLM's own classes; see `real_vllm`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from connector_settings import connector_settings
from ports import free_port

from disagg.model.load.tiny import make_tiny_checkpoint

if TYPE_CHECKING:
    from real_vllm import Make, RealEngine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_checkpoint(tmp_path_factory.mktemp("model"), layers=3, head_dim=32)


@pytest.fixture
def extra(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    settings = connector_settings(tmp_path, peer_timeout_s=3.0)
    return lambda: settings | {"port": free_port()}


@pytest.fixture
def make(model: Path, extra: Callable[[], dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    from real_vllm import RealEngine

    engines: list[RealEngine] = []
    interval_s = sys.getswitchinterval()

    def one(changes: dict[str, Any] | None = None, **options: Any) -> RealEngine:
        engines.append(RealEngine(model, monkeypatch, extra() | (changes or {}), **options))
        return engines[-1]

    yield one
    for engine in engines:
        engine.shutdown()
    sys.setswitchinterval(interval_s)
