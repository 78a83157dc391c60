"""The sources of transformers' models are read once, and `transformers.models` gets the index it would have made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from disagg.core.model_index import models_indexed_once, reuse_index

SOURCES = {
    "one/configuration_one.py": '__all__ = ["OneConfig"]\n',
    "one/modeling_one.py": '__all__ = [\n    "OneModel",\n    "OneForCausalLM",\n]\n',
    "two/tokenization_two.py": '__all__ = ["TwoTokenizer"]\n',
}


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package like transformers, with two models."""
    for name, text in SOURCES.items():
        path = tmp_path / "transformers" / "models" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        (path.parent / "__init__.py").touch()
    (tmp_path / "transformers" / "models" / "__init__.py").touch()
    (tmp_path / "transformers" / "__init__.py").touch()
    return tmp_path / "transformers"


def defined(calls: list[tuple[str, str | None]]) -> Callable[..., Any]:
    """transformers' own `define_import_structure`, which keeps its results; new results are in `calls`."""
    from transformers.utils.import_utils import define_import_structure

    kept: dict[Any, Any] = {}

    def define(module_path: Any, prefix: str | None = None) -> Any:
        if (module_path, prefix) not in kept:
            calls.append((str(module_path), prefix))
            kept[module_path, prefix] = define_import_structure.__wrapped__(module_path, prefix)
        return kept[module_path, prefix]

    return define


def test_the_index_is_the_one_that_transformers_would_make(package: Path) -> None:
    calls: list[tuple[str, str | None]] = []
    define = defined([])
    tools = SimpleNamespace(define_import_structure=defined(calls))
    models, init = package / "models", str(package / "models" / "__init__.py")
    own = tools.define_import_structure(models, prefix="models")
    own[frozenset()].update({"modeling_utils": {"PreTrainedModel"}})  # as transformers does
    reuse_index(tools, models)
    assert tools.define_import_structure(init) == define(init)
    assert calls == [(str(models), "models")], "read once"
    one = str(models / "one" / "__init__.py")
    assert tools.define_import_structure(one) == define(one), "folders of models are indexed as before"


def test_an_import_of_the_models_reads_no_sources(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "models" / "__init__.py").write_text(
        "from ..utils.import_utils import define_import_structure\nINDEX = define_import_structure(__file__)\n"
    )
    calls: list[tuple[str, str | None]] = []
    tools = ModuleType("transformers.utils.import_utils")
    define = defined(calls)
    tools.__dict__["define_import_structure"] = define
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(package.parent)
    monkeypatch.setitem(sys.modules, "transformers.utils", ModuleType("transformers.utils"))
    monkeypatch.setitem(sys.modules, tools.__name__, tools)
    importlib.import_module("transformers")
    define(package / "models", prefix="models")
    before = list(sys.meta_path)
    with models_indexed_once():
        found = importlib.import_module("transformers.models").INDEX
    assert "one.configuration_one" in found[frozenset()]
    assert calls == [(str(package / "models"), "models")], "read once"
    assert sys.meta_path == before
    del sys.modules["transformers.models"], sys.modules["transformers"]


def test_a_function_with_other_parameters_stays(package: Path) -> None:
    def define(path: Any) -> Any:
        return path

    tools = SimpleNamespace(define_import_structure=define)
    reuse_index(tools, package / "models")
    assert tools.define_import_structure is define
