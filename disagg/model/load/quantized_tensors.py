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
from disagg.model.load.weights import WeightSource, require_shape
from disagg.model.spec.quantization import Elements, Quantization, Storage
from disagg.model.tensor_parallel import Cut
from kernels.layers.quantized_weight import QuantizedWeight, chunk_of, misfit, pack_nibbles, scales_shape

_TYPES: dict[Elements, torch.dtype] = {
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
    "int4": torch.uint8,
}
_BITS: dict[Elements, int] = {"fp8": 8, "int8": 8, "int4": 4}
_Place = tuple[Span, Span]
"""Rows and columns of a piece of a weight."""


@dataclass(frozen=True)
class LayerPart:
    """A rank's part of the weight of one linear layer."""

    name: str
    """Name of the layer."""
    shape: tuple[int, int]
    """Output and input features of the whole layer."""
    cut: Cut | None = None

    def pieces(self) -> list[_Place]:
        """Returns the pieces of the part. The pieces lie below each other."""
        rows, columns = (Span(0, size) for size in self.shape)
        if self.cut is None:
            return [(rows, columns)]
        if self.cut.dim == 0:
            return [(span, columns) for span in self.cut.spans]
        (span,) = self.cut.spans
        return [(rows, span)]


class Packing(Protocol):
    """Reads the tensors of one layer. Methods raise ConfigError for missing tensors and for other shapes."""

    markers: tuple[str, ...]
    """Names of tensors that only quantized layers have. Each layer has one of them."""
    scale_names: tuple[str, ...]
    """Names that the scales may have."""

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: _Place, device: torch.device
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
    packed, block = form.elements == "int4", form.block_of(layer.shape)
    pieces = []
    for place in layer.pieces():
        n, k = map(len, place)
        own = _block_at(place, layer.shape, block)
        if why := misfit((n, k), own, packed=packed):
            raise UnsupportedModelError(
                f"quantized {layer.name}, the rank's part [{n}, {k}] is unsupported: {why}"
            )
        values = torch.empty(n, k // 2 if packed else k, dtype=_TYPES[form.elements], device="meta")
        scales = torch.empty(scales_shape((n, k), own), dtype=getattr(torch, form.scales), device="meta")
        zeros = torch.empty(scales.shape, dtype=torch.uint8, device="meta") if form.zeros else None
        pieces.append(QuantizedWeight(values, scales, own, zeros))
    return pieces[0] if len(pieces) == 1 else QuantizedWeight.stacked(pieces)


def read_weight(
    weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
) -> QuantizedWeight:
    """Reads the part of a layer's weight to `device`. Raises ConfigError for missing tensors and other shapes."""
    packing, block = PACKINGS[form.storage], form.block_of(layer.shape)
    scales, zeros = packing.scales(weights, form, layer, device)
    require_shape(f"{layer.name}'s scales", tuple(scales.shape), scales_shape(layer.shape, block))
    pieces = []
    for place in layer.pieces():
        own = _block_at(place, layer.shape, block)
        values = packing.values(weights, form, layer, place, device)
        if form.elements == "int4":
            values = pack_nibbles(values, chunk_of(len(place[1]), own[1], packed=True))
        cut = [None if one is None else _cut(one, place, block, own) for one in (scales, zeros)]
        assert cut[0] is not None
        pieces.append(QuantizedWeight(values, cut[0], own, cut[1]))
    found = pieces[0] if len(pieces) == 1 else QuantizedWeight.stacked(pieces)
    found.check()
    return found


def _block_at(place: _Place, shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    """Returns the block of a piece of a weight: the largest that divides the weight's block and begins with the
    piece."""
    rows, columns = (
        len(span) if each >= size else gcd(each, span.start)
        for span, size, each in zip(place, shape, block, strict=True)
    )
    return rows, columns


def _cut(whole: torch.Tensor, place: _Place, block: tuple[int, int], own: tuple[int, int]) -> torch.Tensor:
    """Returns the scales of a piece, one for each of its own blocks."""
    for dim, (span, each, size) in enumerate(zip(place, block, own, strict=True)):
        if whole.shape[dim] == 1:
            continue
        first = span.start // each
        part = whole.narrow(dim, first, -(-span.stop // each) - first).repeat_interleave(each // size, dim)
        whole = part.narrow(dim, (span.start - first * each) // size, -(-len(span) // size))
    return whole.contiguous()


class _Values(Packing):
    """Values in their own type, beside scales, whose shape may lack dimensions of size 1."""

    markers: tuple[str, ...] = ("weight_scale_inv", "weight_scale")
    scale_names: tuple[str, ...] = markers

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: _Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        dim = 0 if len(place[0]) < layer.shape[0] else 1
        return _load(
            weights,
            f"{layer.name}.weight",
            layer.shape,
            _TYPES[form.elements],
            device,
            Cut(dim, (place[dim],)),
        )

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
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: _Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        (n, k), bits = layer.shape, _BITS[form.elements]
        words = _words(place[1], bits)
        cut = Cut(0, (place[0],)) if len(place[0]) < n else Cut(1, (words,))
        stored = _load(weights, f"{layer.name}.weight_packed", (n, _count(k, bits)), torch.int32, device, cut)
        found = _unpacked(stored, bits)
        return _biased(found if cut.dim == 0 else _narrow(found, place[1], words, bits), k, form)

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
        stored = _load(weights, name, (_count(n, bits), groups), torch.int32, device)
        return found, _unpacked(stored.t(), bits)[:, :n].t().contiguous()


class _Gptq(Packing):
    """Words along the input features, in transposed tensors; zero points are stored `less` than they are."""

    markers: tuple[str, ...] = ("qweight",)
    scale_names: tuple[str, ...] = ("scales",)

    def __init__(self, less: int) -> None:
        self._less = less

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: _Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        (n, k), bits = layer.shape, _BITS[form.elements]
        words = _words(place[1], bits)
        cut = Cut(1, (place[0],)) if len(place[0]) < n else Cut(0, (words,))
        stored = _load(weights, f"{layer.name}.qweight", (_count(k, bits), n), torch.int32, device, cut)
        found = _unpacked(stored.t(), bits)
        return _biased(found if cut.dim == 1 else _narrow(found, place[1], words, bits), k, form)

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        _require_ordered(weights, form, layer, "g_idx")
        n, groups = scales_shape(layer.shape, form.block_of(layer.shape))
        found = (
            _load(weights, f"{layer.name}.scales", (groups, n), getattr(torch, form.scales), device)
            .t()
            .contiguous()
        )
        bits = _BITS[form.elements]
        stored = _load(weights, f"{layer.name}.qzeros", (groups, _count(n, bits)), torch.int32, device)
        zeros = (_unpacked(stored, bits)[:, :n].t() + self._less) & ((1 << bits) - 1)
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
    """Words along the output features, in transposed tensors, with values in the order of `_AWQ_PLACES`."""

    markers: tuple[str, ...] = ("qweight",)
    scale_names: tuple[str, ...] = ("scales",)

    def values(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, place: _Place, device: torch.device
    ) -> torch.Tensor:
        """See `Packing.values`."""
        n, k = layer.shape
        words = _words(place[0], 4)
        cut = Cut(0, (place[1],)) if len(place[1]) < k else Cut(1, (words,))
        stored = _load(weights, f"{layer.name}.qweight", (k, _count(n, 4)), torch.int32, device, cut)
        found = _awq_unpacked(stored)
        return (found if cut.dim == 0 else _narrow(found, place[0], words, 4))[:, :n].t().contiguous()

    def scales(
        self, weights: WeightSource, form: Quantization, layer: LayerPart, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """See `Packing.scales`."""
        n, groups = scales_shape(layer.shape, form.block_of(layer.shape))
        found = _load(weights, f"{layer.name}.scales", (groups, n), getattr(torch, form.scales), device)
        zeros = _load(weights, f"{layer.name}.qzeros", (groups, _count(n, 4)), torch.int32, device)
        return found.t().contiguous(), _awq_unpacked(zeros)[:, :n].t().contiguous()


_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Place in its word, counted from the lowest bits, of each of eight values."""


def _awq_unpacked(words: torch.Tensor) -> torch.Tensor:
    found = _unpacked(words, 4)
    places = torch.tensor(_AWQ_PLACES, device=words.device)
    return found.view(len(found), -1, len(_AWQ_PLACES)).index_select(2, places).view(found.shape)


def _count(size: int, bits: int) -> int:
    """Returns the number of words that hold `size` values."""
    return -(-size * bits // 32)


def _words(span: Span, bits: int) -> Span:
    """Returns the words that hold a span of values."""
    return Span(span.start * bits // 32, _count(span.stop, bits))


def _narrow(values: torch.Tensor, span: Span, words: Span, bits: int) -> torch.Tensor:
    """Returns the columns `span` of a weight, given the values of `words`."""
    return values.narrow(1, span.start - words.start * 32 // bits, len(span))


def _unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Returns the uint8 values of int32 words, from the lowest bits to the highest, along the last dimension."""
    found = words.contiguous().view(torch.uint8)
    return found if bits == 8 else torch.stack((found & 15, found >> 4), -1).flatten(-2)


def _biased(values: torch.Tensor, columns: int, form: Quantization) -> torch.Tensor:
    """Returns unsigned values of `columns` columns at most: 4 bits as they are, 8 bits as int8 around zero."""
    values = values[:, :columns].contiguous()
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
