"""Batch-invariant execution: a token's values have the same bits, independent of the other tokens of the step.

Libraries choose the summation order by the number of rows, for example by splitting a product or by using more
threads for a row. This mode distinguishes three kinds of operations. Operations without sums run unchanged.
Operations with sums are computed row by row, in an order that depends on the summed dimension only. Any unlisted
operation that sums floats raises an error with the operation's name. vLLM and SGLang have batch-invariant modes too,
which list the unsafe operations; this mode lists the safe ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.core.errors import UnsupportedModelError
from disagg.model.layers.merged import merged_of
from disagg.model.layers.quantized import ConvertedProduct, Product, QuantizedLinear, RowWiseProduct
from disagg.model.layers.row_wise_operations import ON_CPU, REPLACED
from disagg.model.tensor_parallel import RowParallelLinear
from kernels.layers.linear import Linear
from kernels.layers.quantized_weight import QuantizedWeight, dequantized

# Operations that move, select, compare or create values, or sum integers. None of these operations rounds a token's
# values in a way that depends on other tokens.
_PASSING_NAMES = """
    alias _to_copy to clone copy_ contiguous detach cat stack concat hstack _unsafe_view view reshape _reshape_alias
    flatten unflatten transpose permute t expand expand_as unsqueeze squeeze select slice narrow split
    split_with_sizes chunk unbind diagonal movedim swapaxes index index_select gather take_along_dim embedding
    index_put_ index_put index_copy index_copy_ scatter scatter_ masked_fill masked_fill_ where tril triu roll flip
    repeat repeat_interleave constant_pad_nd pad empty empty_like empty_strided zeros zeros_like ones ones_like full
    full_like new_empty new_zeros new_ones new_full arange linspace fill_ zero_ scalar_tensor lift_fresh eye
    one_hot nonzero is_nonzero item _local_scalar_dense equal all any amax amin max min argmax argmin argsort
    histc searchsorted bucketize diff unfold view_as_complex view_as_real polar complex
    is_same_size record_stream dropout pin_memory _pin_memory isfinite isnan isinf set_ resize_ unsqueeze_ squeeze_
    transpose_ t_ detach_ _conj _neg_view real imag type_as broadcast_to expand_copy view_copy
"""
_PASSING = frozenset(_PASSING_NAMES.split())
_INTO_MEMORY = ("mm", "addmm")
"""Products that may write to a given output. Only `kernels.layers.linear` calls these with an output, after checking
that the library's bits equal those of the kernel."""


class RowWise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that runs this thread's operations batch-invariantly. One thread may enter it at a time.

    Raises UnsupportedModelError, which names `architecture`, for an operation with an unknown summation order.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._architecture = architecture
        self.replaced: Counter[str] = Counter()
        """Number of operations computed row by row, by name."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Leaves out torch's wrapper, which switches its compiler off and on for each operation. Nothing compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        if _sums_nothing(func):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in _INTO_MEMORY and "out" in kwargs:
            return func(*args, **kwargs)
        replacement = REPLACED.get(name) or (ON_CPU.get(name) if args and _on_cpu(args[0]) else None)
        operands = [*args, *kwargs.values()]
        if replacement is not None and _sums_floats(func, operands):
            self.replaced[name] += 1
            return replacement(*args, **kwargs)
        if _passes(func) or not _sums_floats(func, operands):
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        raise UnsupportedModelError(
            f"{self._architecture} cannot run with model.deterministic = true: the summation order of {name} is "
            "unknown; set model.deterministic to false"
        )


@functools.cache
def _sums_nothing(func: Any) -> bool:
    """Returns whether an operation is never replaced, whatever its operands are. True for most operations."""
    name = func.overloadpacket.__name__
    return _passes(func) and name not in REPLACED and name not in ON_CPU


def _passes(func: Any) -> bool:
    named = func.overloadpacket.__name__ in _PASSING and "reduce" not in func._overloadname
    return named or torch.Tag.pointwise in func.tags


def use_linear_kernels(model: Any) -> None:
    """Replaces the products of `model`'s linear layers by `kernels.layers.linear.Linear`. Load the weights first."""
    for module in model.modules():
        if merged := merged_of(module):
            merged.product = _row_wise(merged.weight, merged.bias, merged.product)
        plain = type(module) is nn.Linear and "forward" not in vars(module)
        if plain and module.weight.is_contiguous():
            module.forward = Linear(module.weight.data, None if module.bias is None else module.bias.data)
        elif isinstance(module, RowParallelLinear):
            module.product = Linear(module.weight.data)
        elif isinstance(module, QuantizedLinear):
            module.product = _row_wise(module.weight_parts, module.own_bias, module.product)


def _row_wise(
    weight: torch.Tensor | QuantizedWeight, bias: torch.Tensor | None, product: Product | None
) -> Product:
    """Returns a product for the deterministic mode, in place of `product`. A quantized weight is still converted by
    the conversion of `product`."""
    if not isinstance(weight, QuantizedWeight):
        return Linear(weight, bias)
    convert = product.convert if isinstance(product, ConvertedProduct) else dequantized
    return RowWiseProduct(weight, bias, convert)


def _sums_floats(func: Any, operands: Sequence[Any]) -> bool:
    """Returns whether an operation may round sums: whether it has float operands that are summed as floats.

    A matrix product over a dimension of size 1 involves no sum. With an integer `dtype`, operands are converted to
    integers before the sum, which is then exact.
    """
    flat = [one for arg in operands for one in (arg if isinstance(arg, list | tuple) else [arg])]
    if any(isinstance(one, torch.dtype) and not _rounds(one) for one in flat):
        return False
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    single = func.overloadpacket.__name__ in ("mm", "bmm") and tensors[0].shape[-1] == 1
    return any(_rounds(one.dtype) for one in tensors) and not single


def _rounds(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def _on_cpu(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"
