"""Random quantized weights of named architectures, for benchmarks and tests without a checkpoint."""

from __future__ import annotations

from math import log2

import torch

from disagg.model.load.weights import RandomWeights, own_part, part_shape, seed_of
from disagg.model.spec.quantization import Elements
from disagg.model.tensor_parallel import Cut

_SPREAD: dict[Elements, float] = {"fp8": 64.0, "int8": 32.0, "int4": 2.5, "fp4": 2.93}
"""Standard deviation of random values by their type. Of 4-bit floats all codes are drawn, with equal probability."""
_E8M0_BIAS = 127


class RandomQuantizedWeights(RandomWeights):
    """Random weights with quantized linear layers and experts, equal for any TP size."""

    def __init__(self, seed: int, std: float, elements: Elements) -> None:
        """`std`: standard deviation of the weights. `elements`: type of quantized values."""
        super().__init__(seed, std)
        self._spread = _SPREAD[elements]
        self._scale = std / self._spread

    def shape_of(self, name: str, expected: tuple[int, ...]) -> tuple[int, ...] | None:
        """See `WeightSource.shape_of`. The columns are in their own order."""
        return None if name.endswith("g_idx") else super().shape_of(name, expected)

    def load(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, cut: Cut | None
    ) -> torch.Tensor | None:
        """See `WeightSource.load`. All scales are equal; those of MXFP4 are the nearest power of two."""
        if name.endswith("_scales") and dtype == torch.uint8:
            exponent = _E8M0_BIAS + round(log2(self._scale))
            return torch.full(part_shape(shape, cut), exponent, dtype=dtype, device=device)
        if name.endswith(("weight_scale", "weight_scale_inv")):
            return torch.full(shape, self._scale, dtype=dtype, device=device)
        if dtype in (torch.float32, torch.bfloat16, torch.float16):
            return super().load(name, shape, dtype, device, cut)
        generator = torch.Generator(device).manual_seed(seed_of(self._seed, name))
        if dtype == torch.uint8:
            whole = torch.randint(0, 256, shape, dtype=dtype, device=device, generator=generator)
            return whole if cut is None else own_part(cut, whole)
        packed = dtype == torch.int32  # eight values of 4 bits in each word
        noise = torch.empty(*shape, *((8,) if packed else ()), device=device)
        noise.normal_(0.0, self._spread, generator=generator)
        if packed:
            shifts = torch.arange(0, 32, 4, device=device)
            whole = ((noise.round().clamp(-8, 7).long() + 8) << shifts).sum(-1).to(dtype)
        else:
            whole = (noise.round().clamp(-127, 127) if dtype == torch.int8 else noise).to(dtype)
        return whole if cut is None else own_part(cut, whole)
