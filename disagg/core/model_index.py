"""Imports of transformers that read the sources of its models once, and look at the end of each source only.

`import transformers` reads the source of each of its models, to find their names, and looks at each line of it.
`transformers.models` reads all of them again when it is imported. Both together take a second of each command and
rank. Another quarter of a second is for a search that `name_own_kernels` avoids.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

_MODELS, _TOOLS = "transformers.models", "transformers.utils.import_utils"


class _ModelsFinder(importlib.abc.MetaPathFinder):
    """Finds no module. Before `transformers.models` is imported, the finder makes the index available to it."""

    adjusted: ClassVar[Any] = None
    """transformers' import_utils, once the finder has adjusted it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        tools = sys.modules.get(_TOOLS)
        if not hasattr(tools, "define_import_structure"):
            return
        if tools is not self.adjusted:  # it has just been imported, and reads the sources next
            _ModelsFinder.adjusted = tools
            read_ends_only(tools)
            name_own_kernels(tools)
        if fullname == _MODELS:
            reuse_index(tools, Path(str(sys.modules["transformers"].__file__)).parent / "models")


def read_ends_only(tools: Any) -> None:
    """Makes `tools` (transformers' import_utils) find the names of a source behind its last `__all__` without a look
    at the lines before.

    Versions whose function has other parameters stay as they are.
    """
    fetch = getattr(tools, "fetch__all__", None)
    if fetch is None or list(inspect.signature(fetch).parameters) != ["file_content"]:
        return

    def fetch_end(file_content: str) -> Any:
        return fetch(file_content[file_content.rfind("\n__all__") + 1 :])

    tools.fetch__all__ = fetch_end


def name_own_kernels(tools: Any) -> None:
    """Names the distribution of this project's package `kernels` for `tools` (transformers' import_utils).

    transformers looks for Hugging Face's package of this name. It would read the file lists of all installed
    distributions to find the distribution of the package that it has met.
    """
    candidates = getattr(tools, "_candidate_distribution_names", None)
    if candidates is None or list(inspect.signature(candidates).parameters) != ["pkg_name"]:
        return

    def candidates_of(pkg_name: str) -> Any:
        return ["disagg"] if pkg_name == "kernels" else candidates(pkg_name)

    tools._candidate_distribution_names = candidates_of


def reuse_index(tools: Any, models: Path) -> None:
    """Makes `tools` (transformers' import_utils) return the index of the folder `models` without reading it again.

    transformers keeps the index that it has made for itself, in which the names of modules begin with "models".
    Versions whose function has other parameters stay as they are.
    """
    define = tools.define_import_structure
    if list(inspect.signature(define).parameters) != ["module_path", "prefix"]:
        return

    def define_once(module_path: str, prefix: str | None = None) -> Any:
        if prefix is not None or Path(module_path) != models / "__init__.py":
            return define(module_path, prefix)
        tools.define_import_structure = define
        own = define(models, prefix="models")
        return {
            backends: {
                name.removeprefix("models."): names
                for name, names in modules.items()
                if name.startswith("models.")
            }
            for backends, modules in own.items()
        }

    tools.define_import_structure = define_once


@contextlib.contextmanager
def models_indexed_once() -> Iterator[None]:
    """Within the block, an import of `transformers.models` does not read the sources of models again."""
    finder = _ModelsFinder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
