"""pytest plugin that records the CPU seconds of each test, and the branches of the product that it takes.

`make sample` runs it twice, see `choose_sample.py`: the first pass records CPU seconds, the second one branches.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

COSTLY_S = 0.05
"""CPU seconds from which a test may leave the sample of `make test`."""
LIGHT = "light"
"""Name under which coverage records the branches of imports and of tests below `COSTLY_S`."""
PACKAGES = ["disagg", "kernels", "staging", "transport", "prefill_node", "decode_node"]
FOLDER = Path(".sample").resolve()
WORKER = os.environ.get("PYTEST_XDIST_WORKER", "")


def costs_s(folder: Path) -> dict[str, float]:
    """Returns the recorded CPU seconds of each test; they include processes that the test has started and awaited."""
    found: dict[str, float] = {}
    for file in folder.glob("costs.*.json"):
        found |= json.loads(file.read_text())
    return found


def _cpu_s() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


class CostRecorder:
    """Writes the CPU seconds of each test."""

    def __init__(self) -> None:
        self._costs_s: dict[str, float] = {}

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        began_s = _cpu_s()
        try:
            return (yield)
        finally:
            self._costs_s[item.nodeid] = _cpu_s() - began_s

    def pytest_sessionfinish(self) -> None:
        (FOLDER / f"costs.{WORKER}.json").write_text(json.dumps(self._costs_s))


class BranchRecorder:
    """Writes the branches that each costly test takes, and those of all light tests together."""

    def __init__(self) -> None:
        import coverage

        self._costs_s = costs_s(FOLDER)
        file = str(FOLDER / f"branches.{WORKER}")
        self._coverage = coverage.Coverage(
            data_file=file, source_pkgs=PACKAGES, branch=True, concurrency="thread", config_file=False
        )
        self._coverage.start()
        self._coverage.switch_context(LIGHT)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        costly = self._costs_s.get(item.nodeid, 0.0) >= COSTLY_S
        self._coverage.switch_context(item.nodeid if costly else LIGHT)
        return (yield)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        self._coverage.save()


def pytest_configure(config: pytest.Config) -> None:
    """Only workers run tests."""
    if WORKER:
        FOLDER.mkdir(exist_ok=True)
        branches = os.environ.get("SAMPLE_PASS") == "branches"
        config.pluginmanager.register(BranchRecorder() if branches else CostRecorder())
