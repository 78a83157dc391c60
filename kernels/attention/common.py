"""Shared parts of the attention kernels: layer parameters, checks, tile sizes, and Triton helpers.

The kernels use the online softmax of FlashAttention: it keeps a running maximum, so that no kernel holds all scores
of a query. The softmax is in float32 and in base 2, because `exp2` is a hardware instruction.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from disagg.core.errors import ConfigError
from kernels.attention.layer_kv import LayerKV, describe
from kernels.dispatch import INTERPRETED, backend

LOG2_E = tl.constexpr(1.4426950408889634)
MAX_HEAD_DIM = 256
QUERY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_WIDEN = tl.constexpr(INTERPRETED)  # the interpreter cannot multiply bfloat16
INT8_TO_FLOAT16 = tl.constexpr("""{
.reg .b32 biased, high, less;
xor.b32 biased, $2, 0x80808080;
mov.b32 high, 0x64646464;
mov.b32 less, 0x64806480;
prmt.b32 $0, biased, high, 0x4140;
prmt.b32 $1, biased, high, 0x4342;
sub.f16x2 $0, $0, less;
sub.f16x2 $1, $1, less;
}""")
"""Assembly that converts four int8 values. The float16 number 1024 + (value + 128) needs no arithmetic: its low 8
bits are the value's bits with the sign bit inverted."""
_E4M3_CAPABILITY = (8, 9)  # first compute capability with float8_e4m3fn in Triton


@dataclass(frozen=True)
class AttentionParams:
    """Attention parameters of a layer."""

    scaling: float
    """Factor on the scores."""
    window_tokens: int | None = None
    """Sliding window: number of tokens that a token sees, including itself."""
    softcap: float | None = None
    """Soft cap of the scores, which become `softcap * tanh(score / softcap)`."""
    sinks: torch.Tensor | None = None
    """Score per head that counts in the denominator of each softmax and has no value vector, `[query heads]`."""
    alibi_slopes: torch.Tensor | None = None
    """float32 `[query heads]`: ALiBi. `slope * (key position - query position)` is added to the product of
    query and key, before `scaling`."""
    alibi_dtype: torch.dtype | None = None
    """ALiBi: type to which the slope, the position and their product are rounded, separately for key and query,
    before the subtraction. None: float32, with the positions subtracted first."""
    chunk_tokens: int | None = None
    """Chunked attention: a token sees only tokens with the same `position // chunk_tokens`."""
    chosen: torch.Tensor | None = None
    """Sparse attention: int32 `[T, most]`, the positions that each token of the step sees; padded with -1."""

    @property
    def torch_only(self) -> str:
        """Feature of this layer that only the torch path supports; empty if the kernels support all its features."""
        if self.alibi_slopes is not None:
            return "ALiBi"
        if self.chosen is not None:
            return "attention to chosen tokens"
        return "" if self.chunk_tokens is None else "attention in chunks of positions"


def unsupported(
    device: torch.device, q_dtype: torch.dtype, kv_dtype: torch.dtype, k_dim: int, v_dim: int
) -> str:
    """Returns the reason why the kernels do not support a model's attention; empty if the kernels support it."""
    if backend(device) != "triton":
        return (
            f"Triton does not run on {device} here (on a CPU: TRITON_INTERPRET=1 and DISAGG_KERNELS=triton)"
        )
    if q_dtype not in QUERY_DTYPES:
        return f"queries of {q_dtype}"
    if max(k_dim, v_dim) > MAX_HEAD_DIM or min(k_dim, v_dim) < 1:
        return f"heads of {k_dim} and {v_dim} elements (1 to {MAX_HEAD_DIM} are supported)"
    if device.type == "cuda" and kv_dtype == torch.float8_e4m3fn:
        found = torch.cuda.get_device_capability(device)
        if found < _E4M3_CAPABILITY:
            return f"{kv_dtype} on a GPU of compute capability {found[0]}.{found[1]} (8.9 is needed)"
    return ""


def check_queries(
    q: torch.Tensor, kv: LayerKV, table: torch.Tensor, params: AttentionParams, out: torch.Tensor
) -> int:
    """Returns the number of query heads per KV head. Raises ValueError for inconsistent tensors."""
    kv.check()
    if table.dim() != 2 or table.dtype != torch.int32 or not table.is_contiguous():
        raise ValueError(f"table must be contiguous int32 [rows, max_tokens]; got {describe(table)}")
    if q.dim() != 3 or q.stride(2) != 1 or q.dtype not in QUERY_DTYPES or q.shape[2] > kv.k.shape[2]:
        raise ValueError(
            f"q must be float [tokens, q_heads, at most {kv.k.shape[2]}], heads contiguous; got {describe(q)}"
        )
    fits = out.shape[:2] == q.shape[:2] and out.dim() == 3 and out.shape[2] <= kv.v.shape[2]
    if not fits or not out.is_contiguous() or out.dtype != q.dtype:
        raise ValueError(
            f"out must be contiguous {q.dtype} [{q.shape[0]}, {q.shape[1]}, at most {kv.v.shape[2]}]; "
            f"got {describe(out)}"
        )
    if q.shape[1] % kv.k.shape[1]:
        raise ValueError(
            f"{q.shape[1]} query heads are not a multiple of {kv.k.shape[1]} KV heads: use the torch path"
        )
    if params.torch_only:
        raise ValueError(f"the kernels do not support {params.torch_only}: use the torch path")
    if params.sinks is not None and (params.sinks.shape != q.shape[1:2] or not params.sinks.is_contiguous()):
        raise ValueError(f"sinks must be contiguous [{q.shape[1]}]; got {describe(params.sinks)}")
    return int(q.shape[1] // kv.k.shape[1])


def check_numbers(n: int, **tensors: torch.Tensor) -> None:
    """Raises ValueError unless each tensor is contiguous int32 or int64 `[n]`. Values are not checked."""
    for name, tensor in tensors.items():
        integer = tensor.dtype in (torch.int32, torch.int64)
        if tensor.shape != (n,) or not integer or not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous int32 or int64 [{n}]; got {describe(tensor)}")


def require_triton(device: torch.device) -> None:
    """Raises ConfigError if Triton does not run on `device`. The alternative is the torch path,
    `disagg.model.attention.torch_attention`."""
    if backend(device) != "triton":
        raise ConfigError(f"the attention kernels need Triton, which does not run on {device} here")


def block_of(count: int) -> int:
    """Returns `count` rounded up to a power of two of at least 16, as `tl.dot` requires of each axis."""
    return max(16, 1 << (count - 1).bit_length())


def on_device(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Returns a context in which the tensor's device is current, as a launch by Triton requires."""
    device = tensor.device
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(device)


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Returns the number of multiprocessors; 1 on a CPU."""
    return 1 if device.type != "cuda" else int(_properties(device)["multiprocessor_count"])


@lru_cache
def shared_bytes(device: torch.device) -> int:
    """Returns the shared memory available to a program; 0 on a CPU."""
    return 0 if device.type != "cuda" else int(_properties(device)["max_shared_mem"])


def _properties(device: torch.device) -> dict[str, Any]:
    index = torch.cuda.current_device() if device.index is None else device.index
    found: dict[str, Any] = driver.active.utils.get_device_properties(index)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def load_rows(  # type: ignore[no-untyped-def]
    rows,  # address of the head in slot 0
    slot,  # int64 [N], valid slots
    DIM: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    SLOT_STRIDE: tl.constexpr,  # noqa: N803
    FP8: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Loads one head of each slot, `[N, BLOCK]`; elements beyond `DIM` are zero. Uses no mask if `DIM` equals
    `BLOCK`, because a mask costs more than the loads."""
    element = tl.arange(0, BLOCK)
    place = rows + slot[:, None] * SLOT_STRIDE + element[None, :]
    found = tl.load(place) if DIM == BLOCK else tl.load(place, mask=(element < DIM)[None, :], other=0)
    if FP8 is not None:
        found = found.to(FP8, bitcast=True)
    return found


@triton.jit  # type: ignore[untyped-decorator]
def load_scales(scales, slot, SCALE_SLOT_STRIDE: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Loads the scale of each slot, as float32 `[N]`."""
    return tl.load(scales + slot * SCALE_SLOT_STRIDE).to(tl.float32)


@triton.jit
def halves(quantized):  # type: ignore[no-untyped-def]
    """Converts quantized values to float16, exactly; every 8-bit type has less precision and range.

    The conversion is inline assembly, which the compiler cannot move: values are converted in the layout in which
    they were loaded. Otherwise the compiler stores 8-bit values in shared memory, converts them afterwards, and
    reads V byte by byte.
    """
    if _WIDEN:
        found = quantized.to(tl.float16)
    elif quantized.dtype == tl.int8:
        found = tl.inline_asm_elementwise(
            INT8_TO_FLOAT16, "=&r,=&r,r", [quantized], dtype=tl.float16, is_pure=False, pack=4
        )
    else:
        found = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [quantized.to(tl.float16)], dtype=tl.float16, is_pure=False, pack=2
        )
    return found


@triton.jit
def half_queries(queries):  # type: ignore[no-untyped-def]
    """Returns 16-bit queries, each row divided by its factor, as float16 `[rows, elements]`, and the factors, float32
    `[rows]`.

    A factor is the power of two that brings the row's largest element to 2^14 .. 2^15. bfloat16 has 8 significant
    bits, so only elements below 2^-28 of the row's largest are rounded, by at most 2^-39 of the largest.
    """
    found = queries.to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(found), 1), 1e-30)
    power = (largest.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True) * (1 / 16384)
    return (found / power[:, None]).to(tl.float16), power


@triton.jit  # type: ignore[untyped-decorator]
def log2_of(scales, EXACT: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    """Returns log2 of positive float32 values. Unless `EXACT`, the computation takes one instruction instead of
    thirty, with a relative or an absolute error of at most 2^-22."""
    if EXACT or _WIDEN:
        found = tl.log2(scales)
    else:
        found = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [scales], dtype=tl.float32, is_pure=True, pack=1
        )
    return found


@triton.jit
def base2_parts(products, scaling, softcap):  # type: ignore[no-untyped-def]
    """Returns two factors whose product is the scores in units of log 2, from the products of queries and keys.

    The factors stay separate, so that a kernel can multiply them and add another term with one rounding (`tl.fma`).
    The result then does not depend on what the compiler fuses.
    """
    if softcap is None:
        raw, factor = products, scaling * LOG2_E
    else:
        # tanh(x) = 1 - 2 / (1 + exp(2x)) is correct at both infinities.
        half = 1.0 + tl.exp2(products * (scaling * (2.0 * LOG2_E / softcap)))
        raw, factor = softcap - 2.0 * softcap / half, LOG2_E
    return raw, factor


@triton.jit
def dot(left, right, added):  # type: ignore[no-untyped-def]
    """Returns `left @ right + added` in float32; without TF32 for float32 operands."""
    if _WIDEN:
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, added, input_precision="ieee")
