"""Fills KV pools with reproducible noise, a function of request, layer, plane, token and head.

Every rank can compute the noise, so a destination rank checks received KV without a second transfer.
"""

from __future__ import annotations

import torch

from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import KVLayout, Shard, Span
from disagg.kv.pool import MHATokenToKVPool

WORD_BYTES = 8
"""Size in bytes of each word that `words` returns."""
_HEAD_WORD_BYTES = 4  # the bytes of a quantized head with its scales are no multiple of a longer word
_POISON = -1
"""The value of every word of a pool after `MHATokenToKVPool.poison`."""
# Splitmix64 (Steele, Lea, Flood, 2014), with its constants as signed words.
_STEP = 0x9E3779B97F4A7C15 - (1 << 64)
_ROUNDS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))


def words(count: int, device: torch.device, first: int = 0) -> torch.Tensor:
    """Returns int64 `[count]` of noise; word `i` depends on `first + i` only."""
    return _mix(torch.arange(first, first + count, device=device))


def check_layout(layout: KVLayout) -> None:
    """Raises `ConfigError` unless a head's bytes are a multiple of the noise's word (4 bytes)."""
    if layout.head_bytes % _HEAD_WORD_BYTES:
        raise ConfigError(
            f"a head of {layout.head_dim} x {layout.dtype} has {layout.head_bytes} bytes; the benchmark needs a "
            f"multiple of {_HEAD_WORD_BYTES}"
        )


class NoisyPool:
    """A rank's KV pool: `fill` writes a request's noise to its slots, `take` compares the slots with the noise."""

    def __init__(
        self, pool: MHATokenToKVPool, shard: Shard, layout: KVLayout, part: Shard | None = None
    ) -> None:
        """`part`: the layers and heads of `shard` that the noise fills; None means all."""
        check_layout(layout)
        self._shard, self._layout = part or shard, layout
        self._pool = pool.buffer.view(torch.int32)
        layers = self._shard.layers.shift(-shard.layers.start)
        heads = self._shard.heads.shift(-shard.heads.start)
        self._words = self._pool[layers.start : layers.stop, :, :, heads.start : heads.stop]

    def fill(self, request: int, slots: torch.Tensor) -> None:
        """Writes the request's noise to its slots, int64 `[tokens]`."""
        self._words[:, :, slots] = self._noise(request, len(slots))

    def take(self, request: int, slots: torch.Tensor) -> None:
        """Checks and poisons the slots. Raises `InvariantError` unless the slots held exactly the request's noise."""
        same = self._words[:, :, slots] == self._noise(request, len(slots))
        if not bool(same.all()):
            layer, side, token, head, _ = (int(i) for i in (~same).nonzero()[0])
            wrong = int((~same).any(dim=-1).sum())
            plane = "kv"[side] if self._layout.planes == 2 else "k and v"
            raise InvariantError(
                f"rank {self._shard.rank} has {wrong} wrong rows of request {request}; the first: layer "
                f"{layer + self._shard.layers.start}, {plane}, token {token}, head "
                f"{head + self._shard.heads.start}"
            )
        self._words[:, :, slots] = _POISON

    def check_untouched(self) -> None:
        """Raises `InvariantError` unless the whole pool is poison."""
        if not bool((self._pool == _POISON).all()):
            raise InvariantError(
                f"rank {self._shard.rank}: bytes were written outside of the requests' slots"
            )

    def _noise(self, request: int, tokens: int) -> torch.Tensor:
        """Returns the noise of this shard, int32 `[layers, planes, tokens, heads, words of a head]`."""
        layout, shard = self._layout, self._shard
        sizes = (layout.layers, layout.planes, tokens, layout.kv_heads, layout.head_bytes // _HEAD_WORD_BYTES)
        parts: tuple[Span | range, ...] = (
            shard.layers,
            range(layout.planes),
            range(tokens),
            shard.heads,
            range(sizes[-1]),
        )
        index = torch.full((1,) * len(sizes), request, device=self._words.device)
        for axis, (size, part) in enumerate(zip(sizes, parts, strict=True)):
            shape = [1] * index.dim()
            shape[axis] = len(part)
            place = torch.tensor(list(part), device=index.device).view(shape)
            index = index * size + place
        return _mix(index).int()


def _mix(index: torch.Tensor) -> torch.Tensor:
    mixed = (index + 1) * _STEP
    for shift, factor in _ROUNDS:
        mixed = (mixed ^ _shifted(mixed, shift)) * factor
    return mixed ^ _shifted(mixed, 31)


def _shifted(value: torch.Tensor, by: int) -> torch.Tensor:
    """Shifts right and fills with zeros: torch's own shift keeps the sign."""
    return (value >> by) & ((1 << (64 - by)) - 1)
