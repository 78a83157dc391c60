"""Runs vLLM's own tests of a connector's life in the scheduler with `DisaggConnector` in place of vLLM's connector.

    python tests/vllm/real/upstream.py SOURCES [ARGUMENT OF PYTEST ...]

`SOURCES`: the folder of vLLM's sources, of the version that is installed: its tests are not in the wheel, and not in
this repository. They are copied into a temporary folder, without vLLM's package. Their helper `create_vllm_config`
makes a configuration with `DisaggConnector` and a tiny model; every scheduler that they make is checked to have the
connector, and ended after its test. Exit code: that of pytest; 2 for unfit sources.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
FOLDER = Path("tests/v1/kv_connector/unit")
FILES = ("test_remote_prefill_lifecycle.py", "test_remote_decode_lifecycle.py")
"""The tests whose subject is the connector that `create_vllm_config` names. Others of the folder replace the
scheduler's connector by a mock, or call the internals of one connector of vLLM."""

SPECULATIVE = "DisaggConnector refuses speculative decoding with recurrent layers"
NOT_APPLICABLE = {
    "test_p_side_chunked_prefill_mamba": "the test patches NixlConnector",
    "test_async_load_does_not_double_reserve_mamba_spec_blocks[none-128-18]": SPECULATIVE,
    "test_async_load_does_not_double_reserve_mamba_spec_blocks[align-16-18]": SPECULATIVE,
}
"""Tests that are skipped, with the reason. A name that vLLM does not have any more is reported."""


class Substitution:
    """A plugin of pytest: vLLM's helpers make schedulers with `DisaggConnector`."""

    def __init__(self, utils: Any, model: Path, extra: dict[str, Any]) -> None:
        self._model, self._extra = model, extra
        self._create_config, self._create_scheduler = utils.create_vllm_config, utils.create_scheduler
        base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
        self._several_groups = hasattr(base, "KVConnectorTransferResults")
        self._schedulers: list[Any] = []
        utils.create_vllm_config, utils.create_scheduler = self.config, self.scheduler

    def config(self, **options: Any) -> Any:
        from ports import free_port

        settings = {
            "model": str(self._model),
            "kv_connector": "DisaggConnector",
            "kv_connector_module_path": "disagg.vllm.connector",
            "kv_role": "kv_both",  # NixlConnector, the default of the helper, does both in any role
            "kv_connector_extra_config": self._extra | {"port": free_port()},
        }
        if not self._several_groups:  # a test of one group also turns the manager of several groups on
            options["disable_hybrid_kv_cache_manager"] = True
        made = self._create_config(**settings | options)
        made.device_config.device_type = "cuda"  # only the connector reads it here
        return made

    def scheduler(self, *args: Any, **options: Any) -> Any:
        made = self._create_scheduler(*args, **options)
        self._schedulers.append(made)
        if type(made.connector).__module__ != "disagg.vllm.connector":
            raise TypeError(f"the test makes a scheduler with {type(made.connector)}, not DisaggConnector")
        return made

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            if reason := NOT_APPLICABLE.get(item.name):
                item.add_marker(pytest.mark.skip(reason=reason))
                sys.stdout.write(f"\n{item.name} does not apply: {reason}")
        missing = sorted(set(NOT_APPLICABLE) - {item.name for item in items})
        if missing:
            sys.stdout.write(f"\nnot among the tests of this version: {', '.join(missing)}")

    @pytest.fixture(autouse=True)
    def ended_schedulers(self) -> Iterator[None]:
        yield
        while self._schedulers:
            self._schedulers.pop().shutdown()


def main(sources: Path, arguments: list[str]) -> int:
    """Runs the tests of `sources`; returns the exit code."""
    import vllm  # before the copy's folder comes first on sys.path

    if problem := unfit(sources, vllm.__version__):
        sys.stderr.write(problem + "\n")
        return 2
    sys.path.insert(0, str(ROOT / "tests/support"))
    from connector_settings import connector_settings

    from disagg.model.load.tiny import make_tiny_checkpoint

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        model = make_tiny_checkpoint(folder / "model", context_tokens=10_000)
        copy(sources, folder)
        sys.path.insert(0, str(folder))
        utils = importlib.import_module(".".join((*FOLDER.parts, "utils")))
        plugin = Substitution(utils, model, connector_settings(folder))
        files = [str(folder / FOLDER / name) for name in FILES]
        where = ["--rootdir", str(folder), "-c", str(folder / "pytest.ini"), "-p", "no:cacheprovider"]
        return int(pytest.main([*where, "-v", *files, *arguments], plugins=[plugin]))


def unfit(sources: Path, installed: str) -> str:
    """Returns why these are not the sources of the installed version; empty if they are."""
    if missing := [name for name in FILES if not (sources / FOLDER / name).is_file()]:
        return f"{sources} has no {FOLDER / missing[0]}: pass the folder of vLLM's sources"
    info = sources / "PKG-INFO"
    found = re.search(r"^Version: (\S+)", info.read_text(), re.MULTILINE) if info.is_file() else None
    if found is not None and found[1] != installed.partition("+")[0]:
        return f"{sources} is vLLM {found[1]}; vLLM {installed} is installed"
    return ""


def copy(sources: Path, folder: Path) -> None:
    """Copies vLLM's test files into `folder`, as the package that their imports name."""
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    cpu_test: test without a GPU\n")
    (folder / FOLDER).mkdir(parents=True)
    for file in (sources / FOLDER).glob("*.py"):
        shutil.copy(file, folder / FOLDER)
    for parent in FOLDER.parents:
        if parent.parts:
            (folder / parent / "__init__.py").touch()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.stderr.write(f"usage: {sys.argv[0]} SOURCES [ARGUMENT OF PYTEST ...]\n")
        sys.exit(2)
    sys.exit(main(Path(sys.argv[1]).resolve(), sys.argv[2:]))
