"""KV caches with a tensor for each layer, in the memory layouts that vLLM's attention backends use."""

from __future__ import annotations

import torch

from kernels.copy.layer_pool import LayerPool

POISON = 0xA5
SHARED = {"nhd, layers in a block": "blnh", "hnd, layers in a block": "blhn"}
SHARED |= {"heads, layers in a block": "bhln", "heads first": "lhbn"}
"""Layouts of vLLM 0.32 with one tensor for all layers, in the order of its blocks, layers, tokens (`n`) and heads."""
VLLM_LAYOUTS = ("nhd, packed", "hnd, packed", "nhd, kv first", "one latent head", "padded blocks", *SHARED)
"""Layouts of vLLM 0.26 and 0.32: in "packed" ones and those of `SHARED`, K and V of a head are one row."""
LAYOUTS = (*VLLM_LAYOUTS, "nhd, blocks first", "hnd, kv first", "hnd, blocks first", "k and v apart")


class Memory:
    """Random or poisoned caches of `layers` layers, and the pool over them."""

    def __init__(
        self,
        layout: str,
        layers: int,
        blocks: int,
        block_size: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        generator: torch.Generator | None,
    ) -> None:
        """Without a generator all bytes are poison."""
        self.layout = layout
        shape = (blocks, block_size, heads, head_dim)
        if layout in SHARED:
            made = _caches_in_one(SHARED[layout], layers, shape, dtype, generator)
        else:
            made = [_cache(layout, shape, dtype, generator) for _ in range(layers)]
        self.caches = [cache for cache, _ in made]
        """The tensor of each layer as vLLM passes it, whatever its memory order."""
        self.pool = LayerPool([planes for _, planes in made])
        self._padding = [_padding_of(cache) for cache in self.caches if layout == "padded blocks"]

    def padding_is_poison(self) -> bool:
        """Whether the bytes between blocks are as they were."""
        if self.layout != "padded blocks":
            return True
        return all(bool((padding.view(torch.uint8) == POISON).all()) for padding in self._padding)


def _cache(
    layout: str, shape: tuple[int, int, int, int], dtype: torch.dtype, generator: torch.Generator | None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    blocks, size, heads, dim = shape
    if layout == "one latent head":
        cache = _random((blocks, size, heads * dim), dtype, generator)
        return cache, [cache.unsqueeze(2)]
    if layout == "k and v apart":
        cache = _random((2, blocks, size, heads, dim), dtype, generator)
        return cache, [cache[0].clone(), cache[1].clone()]
    if layout == "padded blocks":  # blocks of a hybrid model's page size
        padded = _random((blocks, size + 1, heads, 2 * dim), dtype, generator)
        padded[:, size].view(torch.uint8).fill_(POISON)
        return padded[:, :size].transpose(1, 2), [padded[:, :size]]
    order, first = layout.split(", ")
    if first == "packed":
        one = _random(
            (blocks, *((size, heads) if order == "nhd" else (heads, size)), 2 * dim), dtype, generator
        )
        by_heads = one.transpose(1, 2) if order == "nhd" else one
        return by_heads, [by_heads.transpose(1, 2)]
    inner = (size, heads, dim) if order == "nhd" else (heads, size, dim)
    cache = _random((2, blocks, *inner) if first == "kv first" else (blocks, 2, *inner), dtype, generator)
    logical = cache if order == "nhd" else cache.transpose(2, 3)
    return logical, [logical[plane] if first == "kv first" else logical[:, plane] for plane in (0, 1)]


def _caches_in_one(
    order: str,
    layers: int,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    generator: torch.Generator | None,
) -> list[tuple[torch.Tensor, list[torch.Tensor]]]:
    blocks, size, heads, dim = shape
    sizes = {"b": blocks, "l": layers, "n": size, "h": heads}
    one = _random((*(sizes[axis] for axis in order), 2 * dim), dtype, generator)
    by_layers = one.permute(*(order.index(axis) for axis in "lbhn"), 4)
    return [(cache, [cache.transpose(1, 2)]) for cache in by_layers]


def _padding_of(cache: torch.Tensor) -> torch.Tensor:
    """The row after the last token of each block, of a cache `[blocks, heads, block_size, row]`."""
    blocks, heads, size, row = cache.shape
    shape, strides = (blocks, heads, row), (cache.stride(0), cache.stride(1), 1)
    return cache.as_strided(shape, strides, cache.storage_offset() + size * cache.stride(2)).contiguous()


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator | None) -> torch.Tensor:
    count = torch.Size(shape).numel() * dtype.itemsize
    if generator is None:
        return torch.full((count,), POISON, dtype=torch.uint8).view(dtype).view(shape)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).view(shape)
