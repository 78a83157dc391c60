"""Runs a model so that a token's values have the same bits whatever other tokens are in the step.

Libraries choose how to sum by the number of rows: another split of a product, more threads for a row. Here each
operation of a model is one of three kinds. Those that do not sum over rows of different tokens at all pass; those
that sum are computed row by row by kernels whose order follows from the summed dimension alone; what is neither is
refused by name. The same idea as batch-invariant modes of vLLM and SGLang, with a list of what is allowed in place of
a list of what was found to fail.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from disagg.core.errors import UnsupportedModelError
from disagg.model.tp import RowParallelLinear
from kernels.linear import Linear
from kernels.matmul import grouped_matmul, matmul
from kernels.row_sum import row_sum

aten: Any = torch.ops.aten
_FEW = 32
"""Elements that are summed one after the other, where the summed dimension is not the last."""

# They move, select, compare or make values, or sum integers: a token's result has no part of another's rounding.
_PASSING_NAMES = """
    alias _to_copy to clone copy_ contiguous detach cat stack concat hstack _unsafe_view view reshape _reshape_alias
    flatten unflatten transpose permute t expand expand_as unsqueeze squeeze select slice narrow split
    split_with_sizes chunk unbind diagonal movedim swapaxes index index_select gather take_along_dim embedding
    index_put_ index_put index_copy index_copy_ scatter scatter_ masked_fill masked_fill_ where tril triu roll flip
    repeat repeat_interleave constant_pad_nd pad empty empty_like empty_strided zeros zeros_like ones ones_like full
    full_like new_empty new_zeros new_ones new_full arange linspace fill_ zero_ scalar_tensor lift_fresh eye
    one_hot nonzero is_nonzero item _local_scalar_dense equal all any amax amin max min argmax argmin argsort
    bincount histc searchsorted bucketize diff unfold view_as_complex view_as_real polar complex
    is_same_size record_stream dropout pin_memory _pin_memory isfinite isnan isinf set_ resize_ unsqueeze_ squeeze_
    transpose_ t_ detach_ _conj _neg_view real imag type_as broadcast_to expand_copy view_copy
"""
_PASSING = frozenset(_PASSING_NAMES.split())
_INTO_MEMORY = ("mm", "addmm")
"""Products into given memory: those of `kernels.linear`, which has checked the library's bits."""


class RowWise(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is entered, operations of this thread run as the module says. Not to be entered by two threads.

    `architecture` is named in the UnsupportedModelError for an operation of which nothing is known.
    """

    def __init__(self, architecture: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._architecture = architecture
        self.replaced: Counter[str] = Counter()
        """Operations that were computed row by row, by name."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """See `TorchDispatchMode`."""
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        if name in _INTO_MEMORY and "out" in kwargs:
            return func(*args, **kwargs)
        replacement = _REPLACED.get(name) or (_ON_CPU.get(name) if args and _on_cpu(args[0]) else None)
        operands = [*args, *kwargs.values()]
        if replacement is not None and _sums_floats(func, operands):
            self.replaced[name] += 1
            return replacement(*args, **kwargs)
        passes = name in _PASSING and "reduce" not in func._overloadname
        if passes or torch.Tag.pointwise in func.tags or not _sums_floats(func, operands):
            return func(*args, **kwargs)
        if func._can_decompose():
            with self:
                return func.decompose(*args, **kwargs)
        raise UnsupportedModelError(
            f"{self._architecture} cannot run with model.deterministic = true: how {name} sums is not known; "
            "leave model.deterministic off"
        )


def use_linear_kernels(model: Any) -> int:
    """Puts `kernels.linear.Linear` into all linear layers of `model`, whose weights are filled; returns how many."""
    count = 0
    for module in model.modules():
        plain = type(module) is nn.Linear and "forward" not in vars(module)
        if plain and module.weight.is_contiguous():
            module.forward = Linear(module.weight.data, None if module.bias is None else module.bias.data)
            count += 1
        elif isinstance(module, RowParallelLinear):
            module.product = Linear(module.weight.data)
            count += 1
    return count


def _sums_floats(func: Any, operands: Sequence[Any]) -> bool:
    """Whether rounding is at stake. A product of one element each is rounded once, in any order; with an integer
    `dtype` operands are made whole numbers before they are summed."""
    flat = [one for arg in operands for one in (arg if isinstance(arg, list | tuple) else [arg])]
    if any(isinstance(one, torch.dtype) and not one.is_floating_point for one in flat):
        return False
    tensors = [one for one in flat if isinstance(one, torch.Tensor)]
    single = func.overloadpacket.__name__ in ("mm", "bmm") and tensors[0].shape[-1] == 1
    return any(one.dtype.is_floating_point for one in tensors) and not single


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return matmul(rows[None], weight[None].transpose(1, 2), bias)[0].view(*x.shape[:-1], weight.shape[0])


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return matmul(left[None], right[None])[0]


def _mv(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _mm(left, right[:, None])[:, 0]


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _mm(left[None], right[:, None])[0, 0]


def _addmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == alpha == 1 and added.shape == right.shape[1:] and added.is_contiguous():
        return matmul(left[None], right[None], added)[0]
    return beta * added + alpha * _mm(left, right)


def _baddbmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = alpha * matmul(left, right)
    return product if beta == 0 else beta * added + product


def _grouped_mm(
    left: torch.Tensor,
    right: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: None = None,
    out_dtype: None = None,
) -> torch.Tensor:
    assert offs is not None
    return grouped_matmul(left, right, offs)


def _sums(x: torch.Tensor, dims: Sequence[int]) -> torch.Tensor:
    """float32 sums over `dims`, which stay, with one element each."""
    wide = x.float()
    if len(dims) == 1 and dims[0] != x.dim() - 1 and x.shape[dims[0]] <= _FEW:
        total = wide.select(dims[0], 0)
        for index in range(1, x.shape[dims[0]]):
            total = total + wide.select(dims[0], index)
        return total.unsqueeze(dims[0])
    kept = [dim for dim in range(x.dim()) if dim not in dims]
    rows = wide.permute(*kept, *dims).flatten(len(kept)) if dims else wide[..., None]
    found = row_sum(rows)
    for dim in dims:
        found = found.unsqueeze(dim)
    return found


def _dims(x: torch.Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return sorted(one % x.dim() for one in ([dim] if isinstance(dim, int) else dim))


def _sum(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = _dims(x, dim)
    found = _sums(x, dims).to(dtype or x.dtype)
    return found if keepdim else found.squeeze(dims)


def _mean(
    x: torch.Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> torch.Tensor:
    dims = _dims(x, dim)
    count = math.prod(x.shape[one] for one in dims)
    found = (_sums(x, dims) / count).to(dtype or x.dtype)
    return found if keepdim else found.squeeze(dims)


def _var(
    x: torch.Tensor,
    dim: Any = None,
    unbiased: bool = True,
    keepdim: bool = False,
    *,
    correction: float | None = None,
) -> torch.Tensor:
    if isinstance(dim, bool):  # an overload names it first
        dim, unbiased = None, dim
    dims, wide = _dims(x, dim), x.float()
    count = math.prod(x.shape[one] for one in dims)
    off = wide - _sums(wide, dims) / count
    less = float(unbiased) if correction is None else correction
    found = (_sums(off * off, dims) / (count - less)).to(x.dtype)
    return found if keepdim else found.squeeze(dims)


def _std(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _var(x, *args, **kwargs).sqrt()


def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,  # noqa: A002 - torch calls it so
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    wide = x.float()
    squares = {1: wide.abs(), 2: wide * wide}[int(ord)]
    found = _sum(squares, dim, keepdim)
    return (found.sqrt() if ord == 2 else found).to(dtype or x.dtype)


def _exponentials(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores less the largest, and their exponentials' sum."""
    wide = x.float()
    less = wide - wide.amax(dim, keepdim=True)
    return less, _sums(less.exp(), _dims(x, dim))


def _softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    less, total = _exponentials(x, dim)
    return (less.exp() / total).to(torch.float32 if half_to_float else x.dtype)


def _log_softmax(x: torch.Tensor, dim: int, half_to_float: bool = False) -> torch.Tensor:
    less, total = _exponentials(x, dim)
    return (less - total.log()).to(torch.float32 if half_to_float else x.dtype)


def _layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = x.float()
    mean = _mean(wide, dims, keepdim=True)
    rstd = torch.rsqrt(_mean((wide - mean).square(), dims, keepdim=True) + eps)
    found = (wide - mean) * rstd
    if weight is not None:
        found = found * weight.float()
    if bias is not None:
        found = found + bias.float()
    return found.to(x.dtype), mean, rstd


def _rms_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, eps: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    dims = list(range(x.dim() - len(shape), x.dim()))
    wide = x.float()
    rstd = torch.rsqrt(
        _mean(wide.square(), dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    )
    found = wide * rstd
    return (found if weight is None else found * weight.float()).to(x.dtype), rstd


def _topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *unused: bool, **also_unused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of equal values the first, where `torch.topk` takes any."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _sort(
    x: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _index_add_(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """In the order of `index`; torch adds in any order on a GPU."""
    x.transpose(0, dim).index_put_((index,), alpha * source.transpose(0, dim), accumulate=True)
    return x


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return _index_add_(x.clone(), dim, index, source, alpha=alpha)


def _on_cpu(x: object) -> bool:
    return isinstance(x, torch.Tensor) and x.device.type == "cpu"


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return 1 / (1 + (-x).exp())


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + (-x).exp())


def _gelu(x: torch.Tensor, *, approximate: str = "none") -> torch.Tensor:
    if approximate == "none":
        return 0.5 * x * (1 + (x * math.sqrt(0.5)).erf())
    return 0.5 * x * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)).tanh())


def _softplus(x: torch.Tensor, beta: float = 1, threshold: float = 20) -> torch.Tensor:
    return torch.where(x * beta > threshold, x, _log1p((x * beta).exp()) / beta)


def _log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x), also of small x: what 1 + x is rounded by is divided out (W. Kahan)."""
    more = 1 + x
    return torch.where(more == 1, x, more.log() * x / (more - 1))


_ON_CPU: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "log1p": _log1p,
}
"""On a CPU torch computes these otherwise where a tensor ends than in its middle; the functions here it does not."""

_REPLACED: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "mm": _mm,
    "bmm": matmul,
    "mv": _mv,
    "dot": _dot,
    "addmm": _addmm,
    "baddbmm": _baddbmm,
    "_grouped_mm": _grouped_mm,
    "sum": _sum,
    "mean": _mean,
    "var": _var,
    "std": _std,
    "linalg_vector_norm": _vector_norm,
    "_softmax": _softmax,
    "_log_softmax": _log_softmax,
    "native_layer_norm": _layer_norm,
    "_fused_rms_norm": _rms_norm,
    "topk": _topk,
    "sort": _sort,
    "index_add_": _index_add_,
    "index_add": _index_add,
}
