"""A plugin of pytest for processes that interpret Triton: removes repeated work of Triton's interpreter.

The interpreter patches all functions of the language at each launch and at each call of a device function, and
describes the shape of each intermediate result anew. It computes a check of each integer operation for overflow, and
drops the result, because it asserts only in its debug mode. It derives a common type of operands that have one type,
and makes constants anew for each operation. This takes two thirds of the time of small kernels.
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
_converted = TritonSemantic.binary_op_type_checking_impl
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
    if not (left.type.is_block() and right.type.is_block()):
        return _broadcast(self, left, right)
    mine, other = left.type.described.plain, right.type.described.plain
    if mine is other:
        return left, right
    if len(mine) != len(other):
        return _broadcast(self, left, right)
    shape = _common(mine, other)
    return _stretched(left, shape), _stretched(right, shape)


@functools.cache
def _common(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    for mine, other in zip(left, right, strict=True):
        if mine != other and 1 not in (mine, other):
            raise ValueError(f"incompatible shapes {left} and {right}")
    return tuple(map(max, left, right))


def _stretched(operand: Any, shape: tuple[int, ...]) -> Any:
    if operand.type.described.plain == shape:
        return operand
    data = np.broadcast_to(operand.handle.data, shape)
    handle = interpreter.TensorHandle(data, operand.handle.dtype.scalar)
    return core.tensor(handle, core.block_type(operand.dtype, shape))


_MOST_CONSTANTS = 4096
_constants: dict[object, Any] = {}
"""Operands made of numbers, with the type and shape of the other operand. Operations do not change their operands."""


def converted(
    self: Any,
    left: Any,
    right: Any,
    left_pointer: bool = False,
    right_pointer: bool = False,
    arithmetic: bool = True,
    division: bool = False,
) -> tuple[Any, Any]:
    """Gives two operands one type and one shape."""
    flags = left_pointer, right_pointer, arithmetic, division
    if type(left) is not core.tensor:
        return _converted(self, left, right, *flags)
    mine = left.dtype
    if type(right) is core.tensor:
        plain = mine is right.dtype and not division
        if mine.is_ptr():
            plain = left_pointer and right.dtype.is_int()
        return self.broadcast_impl_value(left, right) if plain else _converted(self, left, right, *flags)
    key = (type(right), right, mine.name, left.type.described.plain if left.type.is_block() else (), flags)
    if key in _constants:
        return left, _constants[key]
    operand, constant = _converted(self, left, right, *flags)
    if operand is left and len(_constants) < _MOST_CONSTANTS:
        _constants[key] = constant
    return operand, constant


def describe_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """Initializes a `TensorHandle`."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if too_wide(data, dtype):
        raise ValueError(f"{data.dtype} does not fit {dtype}")


def too_wide(data: np.ndarray[Any, Any], dtype: Any) -> bool:
    """Returns whether an element has more bytes than the type has."""
    return not dtype.is_ptr() and data.itemsize * 8 > max(dtype.primitive_bitwidth, 8)


def operate(self: Any, left: Any, right: Any, operation: Any) -> Any:
    """Computes an operation of two operands of one type."""
    found, kind = operation(left.data, right.data), left.dtype.scalar
    if too_wide(found, kind):
        found = found.astype(numpy_type(kind))
    return interpreter.TensorHandle(found, kind)


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
        self.plain, self.sizes = sizes, core.tuple(sizes)
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
TritonSemantic.binary_op_type_checking_impl = converted
interpreter.TensorHandle.__init__ = describe_handle
interpreter.InterpreterBuilder.binary_op = operate
core.block_type.name = property(lambda self: f"<{self.described.text}, {self.element_ty}>")
core.block_type.to_ir = lambda self, _builder: self
core.block_type.__init__ = describe_block
core.tensor.__init__ = describe_tensor
builder = interpreter.interpreter_builder
builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
