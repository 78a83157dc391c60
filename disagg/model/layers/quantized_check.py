"""Compares the kernels of quantized products with torch on this device, before the first step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import structlog
import torch

from disagg.core.errors import first_line
from disagg.model.layers.merged import MergedProjections, merged_of
from disagg.model.layers.quantized import Convert, ConvertedProduct, QuantizedLinear
from kernels.layers.quantized_linear import each_way, quantized_linear
from kernels.layers.quantized_weight import QuantizedWeight, dequantized, dequantized_reference

_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 8 * 2**-7, torch.float16: 8 * 2**-10}
"""Largest error that rounding and the order of sums explain, relative to the norm of the weight's row. An element of
the result has about the size of this norm if activations are normally distributed."""
log = structlog.get_logger(__name__)


def check_products(model: Any) -> int:
    """Compares a product of each form and shape of quantized weights in `model` with torch's product of the converted
    weight.

    Where the results differ, or a kernel fails, torch multiplies with the converted weight from then on, with a
    warning in the log. Returns the number of these layers. Waits for the device. Call this after `merge_projections`.
    """
    replaced, found = 0, dict[tuple[object, ...], Convert | None]()
    for layer, weight, bias, dtype in _products(model):
        words, scales = weight.words, weight.scales
        form = (weight.elements, scales.dtype, weight.zeros is None, bias is None, dtype)
        kind = (*form, weight.shape, weight.block, words.device)
        if kind not in found:
            found[kind] = replacement(weight, dtype, has_bias=bias is not None)
        if (convert := found[kind]) is not None:
            layer.product = ConvertedProduct(weight, bias, convert)
            replaced += 1
    if found:
        torch.cuda.empty_cache()  # frees the converted weights; does nothing on a CPU
    return replaced


def _products(
    model: Any,
) -> Iterator[tuple[Any, QuantizedWeight, torch.Tensor | None, torch.dtype]]:
    """Yields each quantized layer and each merge of several, with weight, bias and type of activations."""
    merged: list[MergedProjections] = [one for module in model.modules() if (one := merged_of(module))]
    members = {id(layer) for one in merged for layer in one.layers}
    for one in merged:
        if isinstance(one.weight, QuantizedWeight):
            yield one, one.weight, one.bias, one.layers[0].dtype
    for module in model.modules():
        if isinstance(module, QuantizedLinear) and id(module) not in members:
            yield module, module.weight_parts, module.own_bias, module.dtype


@torch.inference_mode()
def replacement(weight: QuantizedWeight, dtype: torch.dtype, *, has_bias: bool) -> Convert | None:
    """Returns None if random rows times `weight` are the same as with torch, but for rounding. Else returns a
    conversion of weights that is right on this device, with a warning in the log."""
    exact = dequantized_reference(weight, torch.float32)
    # Smaller weights are rounded coarsely.
    least = max(1e-30, torch.finfo(dtype).tiny * weight.shape[1] ** 0.5)
    norms = exact.norm(dim=1).clamp_min(least)
    own = torch.Generator().manual_seed(0)  # torch's own generator is not changed
    noise = torch.randn(weight.shape[0], generator=own).to(norms.device)
    bias = (noise * norms).to(dtype) if has_bias else None
    why = ""
    for rows in each_way(weight, dtype):
        x = torch.randn(rows, weight.shape[1], generator=own).to(norms.device, dtype)
        wanted = torch.nn.functional.linear(x.float(), exact, None if bias is None else bias.float())
        try:
            error = float(((quantized_linear(x, weight, bias).float() - wanted).abs() / norms).max())
            why = f"with {rows} rows, an element differs by {error:.2g} of the norm of its weights"
        except torch.OutOfMemoryError:
            raise
        except Exception as exc:  # noqa: BLE001 - Triton and torch raise many kinds
            error, why = math.inf, f"with {rows} rows: {type(exc).__name__}: {first_line(exc)}"
        if not error <= _ALLOWED[dtype]:
            break
    else:
        return None
    convert = dequantized if _converts(weight, dtype) else dequantized_reference
    log.warning(
        "quantized_kernels_disagree",
        values=str(weight.elements).removeprefix("torch."),
        shape=list(weight.shape),
        why=why,
        then="each product converts the weight to floats",
    )
    return convert


def _converts(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Returns whether the kernel that converts whole weights has the same results as torch."""
    try:
        return torch.equal(dequantized(weight, dtype), dequantized_reference(weight, dtype))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # noqa: BLE001
        return False
