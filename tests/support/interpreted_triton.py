"""A plugin of pytest for processes that interpret Triton: removes repeated work of Triton's interpreter.

The interpreter patches all functions of the language at each launch and at each call of a device function, and
describes the shape of each intermediate result anew. It computes a check of each integer operation for overflow, and
drops the result, because it asserts only in its debug mode. This takes more than half of the time of small kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_patch, _numpy_type = interpreter._patch_lang, interpreter._get_np_dtype
_unwrap, _equal = core._unwrap_if_constexpr, core.dtype.__eq__
_broadcast, _reduce = TritonSemantic.broadcast_impl_value, interpreter.ReduceOps.apply_impl
_PLAIN = {bool, int, float, str, type(None), core.tensor, core.dtype, core.block_type, core.pointer_type}
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


def patched_attribute(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Replaces a function of the language by the same function with the interpreter's semantic."""
    function = getattr(member, "__wrapped__", member)

    def with_semantic(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, with_semantic)


def numpy_type(kind: Any) -> Any:
    """Returns the type of numpy for a type of Triton; types of blocks and pointers have no hash."""
    scalar = kind.scalar
    return _numpy_type(scalar) if isinstance(scalar, tl.pointer_type) else _scalar_type(scalar)


def unwrapped(value: Any) -> Any:
    """Returns the value of a constant; what is no collection of constants needs no other checks."""
    kind = type(value)
    if kind is core.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


def same_type(self: Any, other: Any) -> bool:
    """Compares scalar types, of which each has one object in most kernels."""
    return self is other or _equal(self, other)


def broadcast(self: Any, left: Any, right: Any) -> tuple[Any, Any]:
    """Gives two operands one shape; blocks of one shape share the object that describes it."""
    if left.type.is_block() and right.type.is_block() and left.type.shape is right.type.shape:
        return left, right
    broadcast_left, broadcast_right = _broadcast(self, left, right)
    return broadcast_left, broadcast_right


def reduced(self: Any, operands: Any) -> Any:
    """Reduces a tensor along an axis; the interpreter calls the function of an exclusive or for each element."""
    if self.combine_fn != tl.standard._xor_combine:
        return _reduce(self, operands)
    [operand] = operands
    result = np.bitwise_xor.reduce(operand.handle.data, axis=self.axis, keepdims=self.keep_dims)
    return self.to_tensor(result, operand.dtype)


class Shape:
    """What all types and tensors of one shape share; it is never changed."""

    def __init__(self, sizes: tuple[int, ...]) -> None:
        self.sizes = core.tuple(sizes)
        self.numel = validate_block_shape(self.sizes)
        self.text = str(self.sizes)
        self.constants = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(self.numel)


_shape = functools.cache(Shape)
_NO_BLOCK = Shape(())


def describe_block(self: Any, element_ty: Any, shape: Sequence[Any]) -> None:
    """Initializes a `block_type`."""
    sizes = tuple(map(unwrapped, shape))
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    self.described = described = _shape(sizes)
    self.element_ty, self.shape, self.numel = element_ty, described.sizes, described.numel


def describe_tensor(self: Any, handle: Any, kind: Any) -> None:
    """Initializes a `tensor`."""
    self.handle, self.type, self.dtype = handle, kind, kind.scalar
    self.shape, self.numel = (kind.described if kind.is_block() else _NO_BLOCK).constants


interpreter._patch_lang = patched_once
interpreter._patch_attr = patched_attribute
interpreter._get_np_dtype = numpy_type
core._unwrap_if_constexpr = unwrapped
interpreter.ReduceOps.apply_impl = reduced
core.dtype.__eq__ = same_type
TritonSemantic.broadcast_impl_value = broadcast
core.block_type.name = property(lambda self: f"<{self.described.text}, {self.element_ty}>")
core.block_type.to_ir = lambda self, _builder: self
core.block_type.__init__ = describe_block
core.tensor.__init__ = describe_tensor
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
