"""A plugin of pytest for processes that interpret Triton: patches `triton.language` once instead of at each launch.

Triton's interpreter patches all functions of the language at each launch and at each call of a device function, and
builds a table of types at each operation: a quarter of the time of small kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import triton.language as tl
from triton.runtime import interpreter

_patch, _numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
_scalar_type = functools.cache(_numpy_type)


class Kept:
    """A scope whose patches stay after the launch: in this process every launch is interpreted."""

    def restore(self) -> None:
        """Does nothing."""


@functools.cache
def patched_once(function: Callable[..., Any]) -> Kept:
    """Patches the languages that the kernel's module imports."""
    _patch(function)
    return Kept()


def numpy_type(kind: Any) -> Any:
    """Returns the type of numpy for a type of Triton; types of blocks and pointers have no hash."""
    scalar = kind.scalar
    return _numpy_type(scalar) if isinstance(scalar, tl.pointer_type) else _scalar_type(scalar)


interpreter._patch_lang = patched_once
interpreter._get_np_dtype = numpy_type
