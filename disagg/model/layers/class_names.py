"""Names of transformers' module classes, in the form of the registries of fused layers, such as
`llama.LlamaRMSNorm`."""

from __future__ import annotations

import sys
from typing import Any, TypeVar

from torch import nn

Form = TypeVar("Form")


def class_name(module: nn.Module) -> str:
    """Returns `<model package>.<class>` for a module whose class is in transformers; empty for any other class."""
    kind = type(module)
    library, _, rest = kind.__module__.partition(".models.")
    package, _, file = rest.partition(".")
    if library != "transformers" or not file.startswith("modeling_"):
        return ""
    return f"{package}.{kind.__name__}" if from_source(module, kind.__name__) is kind else ""


def from_source(module: nn.Module, name: str) -> Any:
    """Returns the object `name` of the Python module that defines the class of `module`; None if undefined."""
    return getattr(sys.modules.get(type(module).__module__), name, None)


def by_name(*groups: tuple[Form, str]) -> dict[str, Form]:
    """Returns a registry: the form of each class name. A group is a pair (form, class names separated by spaces)."""
    return {name: form for form, names in groups for name in names.split()}
