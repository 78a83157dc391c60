"""Reads the quantized weights of checkpoints: a `Packing` for each way in which they are stored.

All packings are converted to the one layout of `kernels.layers.quantized_weight`. A rank reads its own values, and
cuts its part out of all scales. If a part does not begin at a scale, its scales are repeated for smaller blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Protocol

import torch

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import Span
from disagg.model.load.packed_words import AWQ_PLACES, PackedMatrix, Place
from disagg.model.load.weights import WeightSource, require_shape
from disagg.model.spec.quantization import Elements, Quantization, Storage
from disagg.model.tensor_parallel import Cut
from kernels.layers.quantized_weight import QuantizedWeight, misfit, scales_shape

_TYPES: dict[Elements, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_BITS: dict[Elements, int] = {"fp8": 8, "int8": 8, "int4": 4}


@dataclass(frozen=True)
class LayerPart:
    """A rank's part of the weight of one linear layer."""

    name: str
    """Name of the layer."""
    shape: tuple[int, int]
    """Output and input features of the whole layer."""
    cut: Cut | None = None

    def pieces(self) -> list[Place]:
        """Returns the pieces of the part, which are stacked by rows."""
        rows, columns = (Span(0, size) for size in self.shape)
        if self.cut is None:
            return [(rows, columns)]
        if self.cut.dim == 0:
            return [(span, columns) for span in self.cut.spans]
        (span,) = self.cut.spans
        return [(rows, span)]


class Packing(Protocol):
    """Reads the tensors of one layer. Methods raise ConfigError for missing tensors and for unexpected shapes."""

    markers: tuple[str, ...]
    """Names of tensors that only quantized layers have. Each layer has one of them."""
    scale_names: tuple[str, ...]
    """Names that the scales may have."""

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: Place, device: torch.device
    ) -> torch.Tensor:
        """Returns the values at `place`; 4-bit values as uint8."""

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Returns all scales, in the format's type and the shape of `scales_shape`, and their zero points."""


def empty_weight(form: Quantization, layer: LayerPart) -> QuantizedWeight:
    """Returns a weight with the shapes and types of the part, on the meta device.

    Raises UnsupportedModelError if the kernels do not support its shape.
    """
    block = form.block_of(layer.shape)
    pieces = []
    for place in layer.pieces():
        n, k = map(len, place)
        own = _block_at(place, layer.shape, block)
        if why := misfit((n, k), own):
            raise UnsupportedModelError(
                f"quantized {layer.name}, the rank's part [{n}, {k}] is unsupported: {why}"
            )
        scales = torch.empty(scales_shape((n, k), own), dtype=getattr(torch, form.scales), device="meta")
        zeros = torch.empty(scales.shape, dtype=torch.uint8, device="meta") if form.zeros else None
        pieces.append(QuantizedWeight.empty((n, k), _TYPES[form.elements], scales, own, zeros))
    return QuantizedWeight.stacked(pieces)


def read_weight(
    weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
) -> QuantizedWeight:
    """Reads the part of a layer's weight to `device`.

    Raises ConfigError for missing tensors and unexpected shapes.
    """
    packing, block = PACKINGS[form.storage], form.block_of(layer.shape)
    scales, zeros = packing.scales(weights, form, layer, device)
    require_shape(f"{layer.name}'s scales", tuple(scales.shape), scales_shape(layer.shape, block))
    pieces = []
    for place in layer.pieces():
        own = _block_at(place, layer.shape, block)
        values = packing.values(weights, form, layer, place, device)
        cut = [None if one is None else _cut(one, place, block, own) for one in (scales, zeros)]
        assert cut[0] is not None
        pieces.append(QuantizedWeight.of(values, cut[0], own, cut[1]))
    found = QuantizedWeight.stacked(pieces)
    found.check()
    return found


def _block_at(place: Place, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the block of a piece of a weight: the largest that divides the weight's block and begins with the
    piece."""
    rows, columns = (
        len(span) if each >= size else gcd(each, span.start)
        for span, size, each in zip(place, shape, block, strict=True)
    )
    return rows, columns


def _cut(whole: torch.Tensor, place: Place, block: tuple[int, int], own: tuple[int, int]) -> torch.Tensor:
    """Returns the scales of a piece, one for each of its own blocks."""
    for dim, (span, each, size) in enumerate(zip(place, block, own, strict=True)):
        if whole.shape[dim] == 1:
            continue
        first = span.start // each
        part = whole.narrow(dim, first, -(-span.stop // each) - first).repeat_interleave(each // size, dim)
        whole = part.narrow(dim, (span.start - first * each) // size, -(-len(span) // size))
    return whole.contiguous()


class _Values(Packing):
    """Values in a tensor of their own type (fp8, int8), and scales in another tensor, whose shape may lack dimensions
    of size 1."""

    markers: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    scale_names: tuple[str, ...] = markers

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        dim = 0 if len(place[0]) < layer.shape[0] else 1
        name, dtype = f"{layer.name}.weight", _TYPES[form.elements]
        return _load(weights, name, layer.shape, dtype, device, Cut(dim, (place[dim],)))

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        return _scales(weights, form, layer, device, self.scale_names), None


class _Packed(Packing):
    """Values of 4 or 8 bits in words of 32 bits, along the rows, with half of their range added."""

    markers: tuple[str, ...] = ("weight_packed",)
    scale_names: tuple[str, ...] = ("weight_scale",)

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        stored = PackedMatrix(f"{layer.name}.weight_packed", layer.shape, _BITS[form.elements])
        return _biased(stored.read(weights, device, place), form)

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        _require_ordered(weights, form, layer, "weight_g_idx")
        found = _scales(weights, form, layer, device, self.scale_names)
        if not form.zeros:
            return found, None
        n, groups = found.shape
        name, bits = f"{layer.name}.weight_zero_point", _BITS[form.elements]
        zeros = PackedMatrix(name, (groups, n), bits, transposed=True).read(weights, device)
        return found, zeros.t().contiguous()


class _Gptq(Packing):
    """Words along the input features, in transposed tensors."""

    markers: tuple[str, ...] = ("qweight",)
    scale_names: tuple[str, ...] = ("scales",)

    def __init__(self, less: int) -> None:
        """`less`: the number that is subtracted from zero points before they are stored."""
        self._less = less

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        name, bits = f"{layer.name}.qweight", _BITS[form.elements]
        stored = PackedMatrix(name, layer.shape, bits, transposed=True)
        return _biased(stored.read(weights, device, place), form)

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        _require_ordered(weights, form, layer, "g_idx")
        found, bits = _transposed_scales(weights, form, layer, device), _BITS[form.elements]
        n, groups = found.shape
        stored = PackedMatrix(f"{layer.name}.qzeros", (groups, n), bits).read(weights, device)
        zeros = (stored.t() + self._less) & ((1 << bits) - 1)
        middle = 1 << (bits - 1)
        if not form.zeros and not bool((zeros == middle).all()):
            raise ConfigError(
                f"{layer.name}.qzeros has zero points other than {middle}, but the configuration has sym = true"
            )
        return found, zeros.contiguous() if form.zeros else None


def _require_ordered(weights: WeightSource, form: Quantization, layer: LayerPart, leaf: str) -> None:
    """Raises UnsupportedModelError unless each group is a range of columns. `leaf`: the tensor with the group of each
    column, which may be missing."""
    k, name = layer.shape[1], f"{layer.name}.{leaf}"
    if weights.shape_of(name, (k,)) is None:
        return
    groups = _load(weights, name, (k,), torch.int32, torch.device("cpu"))
    if not torch.equal(groups, torch.arange(k, dtype=torch.int32) // form.block_of(layer.shape)[1]):
        raise UnsupportedModelError(
            f"{name} orders columns by importance, which is not supported; quantize with desc_act = false (GPTQ) or "
            f"actorder = weight (compressed-tensors)"
        )


class _Awq(Packing):
    """Words along the output features, in transposed tensors, with values in the order of `AWQ_PLACES`."""

    markers: tuple[str, ...] = ("qweight",)
    scale_names: tuple[str, ...] = ("scales",)

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        (n, k), (rows, columns) = layer.shape, place
        stored = PackedMatrix(f"{layer.name}.qweight", (k, n), 4, places=AWQ_PLACES)
        return stored.read(weights, device, (columns, rows)).t().contiguous()

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        found = _transposed_scales(weights, form, layer, device)
        n, groups = found.shape
        zeros = PackedMatrix(f"{layer.name}.qzeros", (groups, n), 4, places=AWQ_PLACES)
        return found, zeros.read(weights, device).t().contiguous()


def _biased(values: torch.Tensor, form: Quantization) -> torch.Tensor:
    """Returns unsigned values of 4 bits unchanged; converts unsigned values of 8 bits to int8 by subtracting 128."""
    values = values.contiguous()
    return values if form.elements == "int4" else (values ^ 128).view(torch.int8)


def _scales(
    weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device, names: tuple[str, ...]
) -> torch.Tensor:
    expected = scales_shape(layer.shape, form.block_of(layer.shape))
    for leaf in names:
        name = f"{layer.name}.{leaf}"
        stored = weights.shape_of(name, expected)
        if stored is not None:
            found = _load(weights, name, stored, getattr(torch, form.scales), device)
            if _without_ones(stored) != _without_ones(expected):
                require_shape(name, stored, expected)
            return found.view(expected)
    raise ConfigError(f"the checkpoint has no weight named {layer.name}.{names[0]}")


def _transposed_scales(
    weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
) -> torch.Tensor:
    """Returns the scales of a tensor `scales` that is stored as `[groups, out]`."""
    n, groups = scales_shape(layer.shape, form.block_of(layer.shape))
    stored = _load(weights, f"{layer.name}.scales", (groups, n), getattr(torch, form.scales), device)
    return stored.t().contiguous()


def _without_ones(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size != 1]


def _load(
    weights: WeightSource,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    cut: Cut | None = None,
) -> torch.Tensor:
    found = weights.load(name, shape, dtype, device, cut)
    assert found is not None, name
    return found


PACKINGS: dict[Storage, Packing] = {
    "values": _Values(),
    "packed": _Packed(),
    "gptq": _Gptq(1),
    "gptq_v2": _Gptq(0),
    "awq": _Awq(),
}
"""Readers by the storage of `Quantization`."""
