"""The KV pool of one rank: one allocation with K and V of every layer, addressed by slot.

With one allocation, a peer maps the pool once, and one kernel moves any rectangle of it.

A quantized pool (int8, fp8) has one row per head: quantized K and V, `head_dim` bytes each, then two bfloat16 scales.
Code that moves heads (gather, scatter, writes to a peer, the planner) therefore moves the scales too. A head of 128
elements takes 260 bytes, 0.508 of its size in bf16; a head of 64 elements takes 132 bytes, 0.516. Rows are aligned to
4 bytes, so kernels load quantized values in units of at most 4 bytes. Separate scales, with values aligned to 16
bytes, did not speed up decode attention (H200: 2.1 TB/s instead of 2.2).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

from disagg.core.errors import ConfigError
from disagg.core.types import DTYPE_BYTES, SCALE_BYTES, KVLayout, Shard, dtype_name, quantized_row_bytes
from kernels.attention.kv_write import dequantize, kv_write_reference
from kernels.attention.layer_kv import QUANTIZED, LayerKV, quantized_layer


def whole_pages(pool_tokens: int, page_size: int) -> int:
    """Returns how many pages of `page_size` tokens fit `pool_tokens`. Raises ConfigError for fewer than two pages."""
    if page_size < 1 or pool_tokens // page_size < 2:
        raise ConfigError(
            f"a pool of {pool_tokens} tokens has no room for 2 pages of {page_size} (one is the trash page); "
            f"give it at least {2 * max(1, page_size)} tokens"
        )
    return pool_tokens // page_size


class MHATokenToKVPool:
    """K and V of `slots` tokens: `buffer`, contiguous `[layers, 2 (k, v), slots, heads, head_dim]`.

    `heads` are the rank's heads. All ranks of a group use the same slot numbers. A quantized pool's `buffer` is
    uint8 `[layers, 1, slots, heads, quantized_row_bytes(head_dim)]`; `write` and `read` convert. A pool that stores
    only keys also has one plane instead of two, for `write_keys` and `read_keys`. The memory starts uninitialized:
    slots must be written before they are read.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        has_v: bool = True,
    ) -> None:
        if min(layers, slots, heads, head_dim) < 1:
            raise ConfigError(
                f"a KV pool of {layers} layers x {slots} slots x {heads} heads x {head_dim} is empty"
            )
        if dtype_name(dtype) not in DTYPE_BYTES:
            raise ConfigError(f"a KV pool cannot hold {dtype}; it can hold {', '.join(DTYPE_BYTES)}")
        quantized = dtype in QUANTIZED
        if quantized and head_dim % SCALE_BYTES:
            raise ConfigError(
                f"a KV pool of {dtype} needs heads of a multiple of {SCALE_BYTES} elements, not {head_dim}: its "
                "rows would not be aligned"
            )
        if quantized and not has_v:
            raise ConfigError(f"a pool of index keys cannot hold {dtype}; it can hold floats")
        self.dtype = dtype
        self.storage_dtype = torch.uint8 if quantized else dtype
        self.head_dim = head_dim
        """Number of elements of one head."""
        row = (
            (1, slots, heads, quantized_row_bytes(head_dim))
            if quantized
            else (1 + has_v, slots, heads, head_dim)
        )
        self.buffer = torch.empty((layers, *row), dtype=self.storage_dtype, device=device)

    @property
    def parts(self) -> tuple[MHATokenToKVPool, ...]:
        """The pool itself, because all its layers are of one class."""
        return (self,)

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.buffer.device

    @property
    def layers(self) -> int:
        """Number of layers that the pool holds."""
        return self.buffer.shape[0]

    @property
    def slots(self) -> int:
        """Tokens that the pool holds, the trash page included."""
        return self.buffer.shape[2]

    @property
    def heads(self) -> int:
        """Number of KV heads of this rank."""
        return self.buffer.shape[3]

    @property
    def nbytes(self) -> int:
        """Size of the allocation."""
        return self.buffer.nbytes

    def layer(self, layer: int) -> LayerKV:
        """Returns views of one layer's K and V, with scales if quantized."""
        if self.dtype not in QUANTIZED:
            k, v = self.buffer[layer]
            return LayerKV(k, v, self.dtype)
        return quantized_layer(self.buffer[layer, 0], self.head_dim, self.dtype)

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k`, `v` `[tokens, heads, up to head_dim]` at `slots` (int64 `[tokens]`, on the pool's device).

        Narrower heads are padded with zeros; wider floats are rounded to the pool's dtype. See
        `kernels.attention.kv_write`.
        """
        kv_write_reference(k, v, slots, self.layer(layer))

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns copies of K and V at `slots` (int64, any shape) as `dtype`, `[*slots.shape, heads, head_dim]`."""
        kv = self.layer(layer)
        if kv.k_scales is None or kv.v_scales is None:
            return kv.k[slots].to(dtype), kv.v[slots].to(dtype)
        k = dequantize(kv.k[slots], kv.k_scales[slots], self.dtype)
        return k.to(dtype), dequantize(kv.v[slots], kv.v_scales[slots], self.dtype).to(dtype)

    def write_keys(self, layer: int, slots: torch.Tensor, keys: torch.Tensor) -> None:
        """Stores `keys` `[tokens, heads, head_dim]` at `slots` (int64 `[tokens]`) of a pool that has only keys."""
        self.buffer[layer, 0].index_copy_(0, slots, keys.to(self.dtype))

    def read_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Returns copies of the keys at `slots` of a pool that has only keys, `[*slots.shape, heads, head_dim]`."""
        return self.buffer[layer, 0, slots]

    def poison(self) -> None:
        """Fills the pool with 0xFF bytes, which are NaN in every float type, so that tests detect reads of unwritten
        slots."""
        self.buffer.view(torch.uint8).fill_(0xFF)


class ClassedKVPool:
    """The pool of a model with several classes of layers: one pool per class, all with the same slots.

    `parts` and the layer numbers follow the order of `KVLayout.classes`.
    """

    def __init__(self, parts: Sequence[MHATokenToKVPool]) -> None:
        self.parts = tuple(parts)
        self._ends = list(accumulate(part.layers for part in parts))

    @property
    def device(self) -> torch.device:
        """Device of the memory."""
        return self.parts[0].device

    @property
    def dtype(self) -> torch.dtype:
        """Element type; the quantized type of a quantized pool."""
        return self.parts[0].dtype

    @property
    def layers(self) -> int:
        """Number of layers of all classes."""
        return self._ends[-1]

    @property
    def slots(self) -> int:
        """Tokens that the pool holds, the trash page included."""
        return self.parts[0].slots

    @property
    def nbytes(self) -> int:
        """Size of the allocations."""
        return sum(part.nbytes for part in self.parts)

    def place(self, layer: int) -> tuple[int, int]:
        """Returns the class of a layer and the layer's index within the class."""
        number = bisect_right(self._ends, layer)
        return number, layer - self._ends[number] + self.parts[number].layers

    def poison(self) -> None:
        """Fills the pools of all classes with NaN bytes; see `MHATokenToKVPool.poison`."""
        for part in self.parts:
            part.poison()


KVPool = MHATokenToKVPool | ClassedKVPool


def make_pool(
    layout: KVLayout, shard: Shard, slots: int, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> KVPool:
    """Returns the pool of the rank that owns `shard`. Raises ConfigError, see `MHATokenToKVPool`."""
    parts = [
        MHATokenToKVPool(
            len(part.layers), slots, len(part.heads), one.head_dim, dtype, device, has_v=one.has_v
        )
        for part, one in zip(shard.parts, layout.classes, strict=True)
    ]
    return ClassedKVPool(parts) if len(parts) > 1 else parts[0]
