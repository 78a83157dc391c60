"""The KV pool of one rank: one allocation that holds K and V of every layer, addressed by slot.

One allocation, so that a peer maps it once and one kernel moves any rectangle of it.
"""

from __future__ import annotations

import torch

from disagg.core.errors import ConfigError
from disagg.core.types import DTYPE_BYTES

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def dtype_name(dtype: torch.dtype) -> str:
    """torch's name of a dtype without the module, as `KVLayout.dtype` has it."""
    return str(dtype).removeprefix("torch.")


class MHATokenToKVPool:
    """K and V of `slots` tokens: `buffer`, contiguous `[layers, 2 (k, v), slots, heads, head_dim]`.

    `heads` are the rank's own. All ranks of a group use the same slot numbers. fp8 is stored as uint8 in
    `buffer` (index operations on fp8 are missing in places); `write` and `read` convert. The memory starts
    unset: a slot is read only after it was written.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        if min(layers, slots, heads, head_dim) < 1:
            raise ConfigError(
                f"a KV pool of {layers} layers x {slots} slots x {heads} heads x {head_dim} is empty"
            )
        if dtype_name(dtype) not in DTYPE_BYTES:
            raise ConfigError(f"a KV pool cannot hold {dtype}; it can hold {', '.join(DTYPE_BYTES)}")
        self.dtype = dtype
        self.storage_dtype = torch.uint8 if dtype in _FP8 else dtype
        shape = (layers, 2, slots, heads, head_dim)
        self.buffer = torch.empty(shape, dtype=self.storage_dtype, device=device)

    @property
    def layers(self) -> int:
        """Layers that the pool holds."""
        return self.buffer.shape[0]

    @property
    def slots(self) -> int:
        """Tokens that the pool holds, the trash page included."""
        return self.buffer.shape[2]

    @property
    def heads(self) -> int:
        """KV heads of this rank."""
        return self.buffer.shape[3]

    @property
    def head_dim(self) -> int:
        """Elements of one head."""
        return self.buffer.shape[4]

    @property
    def nbytes(self) -> int:
        """Size of the allocation."""
        return self.buffer.nbytes

    def key(self, layer: int) -> torch.Tensor:
        """View `[slots, heads, head_dim]` of one layer's K in `storage_dtype`."""
        return self.buffer[layer, 0]

    def value(self, layer: int) -> torch.Tensor:
        """View `[slots, heads, head_dim]` of one layer's V in `storage_dtype`."""
        return self.buffer[layer, 1]

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Stores `k`, `v` `[tokens, heads, head_dim]` at `slots` (int64 `[tokens]`, on the pool's device).

        A wider float is rounded to the pool's dtype; for fp8 it is clamped to the largest finite value first,
        because the cast alone would make NaN of it.
        """
        expected = (len(slots), self.heads, self.head_dim)
        if tuple(k.shape) != expected or tuple(v.shape) != expected:
            raise ValueError(f"`k`, `v` must be {expected}, not {tuple(k.shape)} and {tuple(v.shape)}")
        self.key(layer).index_copy_(0, slots, self._encode(k))
        self.value(layer).index_copy_(0, slots, self._encode(v))

    def read(self, layer: int, slots: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of K and V `[*slots.shape, heads, head_dim]` at `slots` (int64, any shape), as `dtype`."""
        return self._decode(self.key(layer)[slots], dtype), self._decode(self.value(layer)[slots], dtype)

    def poison(self) -> None:
        """Fills the pool with 0xFF bytes, NaN in every float type: unwritten memory that is used shows."""
        self.buffer.view(torch.uint8).fill_(0xFF)

    def _encode(self, x: torch.Tensor) -> torch.Tensor:
        if self.dtype not in _FP8:
            return x.to(self.dtype)
        limit = torch.finfo(self.dtype).max
        return x.clamp(-limit, limit).to(self.dtype).view(torch.uint8)

    def _decode(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return x.view(self.dtype).to(dtype)
