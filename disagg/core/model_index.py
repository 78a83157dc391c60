"""Imports of transformers that read the sources of its models once.

`import transformers` reads the source of each of its models, to find their names. `transformers.models` reads all of
them again when it is imported, which takes half a second of each command and rank.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import inspect
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

_MODELS, _TOOLS = "transformers.models", "transformers.utils.import_utils"


class _ModelsFinder(importlib.abc.MetaPathFinder):
    """Finds no module. Before `transformers.models` is imported, the finder makes the index available to it."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> None:
        """See `importlib.abc.MetaPathFinder.find_spec`."""
        if fullname == _MODELS and hasattr(sys.modules.get(_TOOLS), "define_import_structure"):
            reuse_index(
                sys.modules[_TOOLS], Path(str(sys.modules["transformers"].__file__)).parent / "models"
            )


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
