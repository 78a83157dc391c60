"""The sources of transformers' models are read once, and `transformers.models` gets the index it would have made."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from disagg.core.model_index import models_indexed_once, name_own_kernels, read_ends_only, reuse_index

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
    from transformers.utils.import_utils import _candidate_distribution_names, fetch__all__

    (package / "models" / "__init__.py").write_text(
        "from ..utils.import_utils import define_import_structure\nINDEX = define_import_structure(__file__)\n"
    )
    calls: list[tuple[str, str | None]] = []
    tools = ModuleType("transformers.utils.import_utils")
    define = defined(calls)
    tools.__dict__.update(define_import_structure=define, fetch__all__=fetch__all__)
    names = tools.__dict__["_candidate_distribution_names"] = _candidate_distribution_names
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
    assert tools.__dict__["fetch__all__"] is not fetch__all__, "and at its end only"
    assert tools.__dict__["_candidate_distribution_names"] is not names
    adjusted = dict(vars(tools))
    with models_indexed_once(), pytest.raises(ModuleNotFoundError):
        importlib.import_module("transformers.none")
    assert vars(tools) == adjusted, "adjusted once"
    assert sys.meta_path == before
    del sys.modules["transformers.models"], sys.modules["transformers"]


def test_a_function_with_other_parameters_stays(package: Path) -> None:
    def define(path: Any) -> Any:
        return path

    tools = SimpleNamespace(define_import_structure=define)
    reuse_index(tools, package / "models")
    assert tools.define_import_structure is define


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ('import a\n\n__all__ = ["One", "Two"]\n', ["One", "Two"]),
        ('import a\n__all__ = [\n    "One",\n    "Two",\n]\n', ["One", "Two"]),
        ('__all__ = ["One"]\n', ["One"]),
        ('__all__ = ["One"]\n__all__ = ["Two"]\n', ["Two"]),
        ('    __all__ = ["One"]\n', []),
        ("print(__all__)\n", []),
        ("", []),
    ],
)
def test_names_are_those_behind_the_last_definition(source: str, names: list[str]) -> None:
    from transformers.utils.import_utils import fetch__all__

    looked_at: list[str] = []

    def fetch(file_content: str) -> Any:
        looked_at.append(file_content)
        return fetch__all__(file_content)

    tools = SimpleNamespace(fetch__all__=fetch)
    read_ends_only(tools)
    assert tools.fetch__all__(source) == fetch__all__(source) == names
    assert "import" not in looked_at[0], "lines before the definition are left out"


def test_a_function_that_reads_a_file_stays() -> None:
    def fetch(path: Any) -> Any:
        return path

    tools = SimpleNamespace(fetch__all__=fetch)
    read_ends_only(tools)
    assert tools.fetch__all__ is fetch


def test_transformers_gets_the_distribution_of_this_projects_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """With it, transformers finds the version that it would find with a search, and no kernels of Hugging Face."""
    from transformers.utils import import_utils

    searched: list[str] = []

    def candidates(pkg_name: str) -> list[str]:
        searched.append(pkg_name)
        return [pkg_name]

    tools = SimpleNamespace(_candidate_distribution_names=candidates)
    name_own_kernels(tools)
    assert tools._candidate_distribution_names("other") == ["other"]
    found = tools._candidate_distribution_names("kernels")
    assert (found, searched) == (["disagg"], ["other"])
    monkeypatch.setattr(import_utils, "_candidate_distribution_names", lambda pkg_name: found)
    assert import_utils._is_package_available("kernels", return_version=True) == (True, version("disagg"))
    assert not import_utils.is_kernels_available.__wrapped__()
