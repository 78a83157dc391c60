"""Row-by-row versions of torch operations with sums, used by `disagg.model.layers.row_wise`.

Each function has the arguments and results of the torch operation of the same name. Sums are in float32, in an order
that depends on the summed dimension only, and the result is rounded once. Unsupported arguments raise ValueError.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.dispatch import backend
from kernels.layers.matmul import DTYPES, grouped_matmul, matmul
from kernels.layers.pairwise import pairwise_product
from kernels.layers.row_sum import row_sum

_FEW = 32
"""Largest size of a dimension, other than the last one, whose slices are added one after the other."""


def _wide(x: torch.Tensor) -> torch.Tensor:
    """Returns `x` in float32. Raises ValueError for types whose values float32 would round."""
    if x.dtype not in DTYPES:
        raise ValueError(f"model.deterministic = true does not support sums of {x.dtype}; set it to false")
    return x.float()


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    bias = None if bias is None else bias.contiguous()
    return matmul(rows[None], weight[None].transpose(1, 2), bias)[0].view(*x.shape[:-1], weight.shape[0])


def _mm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return matmul(left[None], right[None])[0]


def _bmm(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """Multiplies batches of matrices. In attention, the summed dimension may be a padded context: without the Triton
    kernel, the padding changes no bits."""
    return matmul(left, right) if backend(left.device) == "triton" else pairwise_product(left, right)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    if right.dim() == 1:
        return _matmul(left, right[:, None]).squeeze(-1)
    if left.dim() == 1:
        return _matmul(left[None], right).squeeze(-2)
    if right.dim() == 2:
        return _mm(left.reshape(-1, left.shape[-1]), right).view(*left.shape[:-1], right.shape[1])
    batch = torch.broadcast_shapes(left.shape[:-2], right.shape[:-2])  # type: ignore[no-untyped-call]
    left, right = (one.expand(*batch, *one.shape[-2:]).flatten(0, -3) for one in (left, right))
    return _bmm(left, right).view(*batch, left.shape[-2], right.shape[-1])


def _mv(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _mm(left, right[:, None])[:, 0]


def _dot(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    return _mm(left[None], right[:, None])[0, 0]


def _addmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    if beta == alpha == 1 and added.shape == right.shape[1:] and added.is_contiguous():
        return matmul(left[None], right[None], added)[0]
    product = alpha * _mm(left, right)
    return product if beta == 0 else beta * added + product


def _baddbmm(
    added: torch.Tensor, left: torch.Tensor, right: torch.Tensor, *, beta: float = 1, alpha: float = 1
) -> torch.Tensor:
    product = alpha * _bmm(left, right)
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
    """Returns float32 sums over `dims`. These dimensions are kept, with one element each."""
    wide = _wide(x)
    if not wide.numel():
        return wide.sum(tuple(dims), keepdim=True)
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
    if dim is None or dim == [] or x.dim() == 0:
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
    if isinstance(dim, bool):  # the overload whose first argument is `unbiased`
        dim, unbiased = None, dim
    dims, wide = _dims(x, dim), _wide(x)
    count = math.prod(x.shape[one] for one in dims)
    off = wide - _sums(wide, dims) / count
    less = float(unbiased) if correction is None else correction
    found = (_sums(off * off, dims) / (count - less)).to(x.dtype)
    return found if keepdim else found.squeeze(dims)


def _std(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    return _var(x, *args, **kwargs).sqrt()


def _vector_norm(
    x: torch.Tensor,
    ord: float = 2,  # noqa: A002 - torch's name
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    if ord not in (1, 2):
        raise ValueError(f"model.deterministic = true does not support norms of order {ord}; set it to false")
    wide = _wide(x)
    found = _sum(wide.abs() if ord == 1 else wide * wide, dim, keepdim)
    return (found.sqrt() if ord == 2 else found).to(dtype or x.dtype)


def _exponentials(x: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `x` minus its maximum along `dim`, in float32, and the sum of the exponentials of these differences."""
    wide = _wide(x)
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
    wide = _wide(x)
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
    wide = _wide(x)
    rstd = torch.rsqrt(
        _mean(wide.square(), dims, keepdim=True) + (torch.finfo(x.dtype).eps if eps is None else eps)
    )
    found = wide * rstd
    return (found if weight is None else found * weight.float()).to(x.dtype), rstd


def _topk(
    x: torch.Tensor, k: int, dim: int = -1, largest: bool = True, *unused: bool, **also_unused: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Works like `torch.topk`, but chooses the first ones of equal values; `torch.topk` may choose any of them."""
    values, indices = torch.sort(x, dim=dim, descending=largest, stable=True)
    return values.narrow(dim, 0, k), indices.narrow(dim, 0, k)


def _sort(
    x: torch.Tensor, dim: int = -1, descending: bool = False, *, stable: bool = True
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sort(x, dim=dim, descending=descending, stable=True)


def _index_add_(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    """Works like `index_add_`, but adds in the order of `index`; torch's order is not fixed on a GPU."""
    x.transpose(0, dim).index_put_((index,), alpha * source.transpose(0, dim), accumulate=True)
    return x


def _index_add(
    x: torch.Tensor, dim: int, index: torch.Tensor, source: torch.Tensor, *, alpha: float = 1
) -> torch.Tensor:
    return _index_add_(x.clone(), dim, index, source, alpha=alpha)


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
    """Returns log(1 + x), accurate for small x: the division cancels the rounding of 1 + x (W. Kahan)."""
    more = 1 + x
    return torch.where(more == 1, x, more.log() * x / (more - 1))


ON_CPU: dict[str, Callable[..., Any]] = {
    "sigmoid": _sigmoid,
    "silu": _silu,
    "gelu": _gelu,
    "softplus": _softplus,
    "log1p": _log1p,
}
"""Operations replaced on a CPU only: there, torch rounds the last elements of a tensor differently from its other
elements."""

REPLACED: dict[str, Callable[..., Any]] = {
    "linear": _linear,
    "mm": _mm,
    "bmm": _bmm,
    "matmul": _matmul,
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
