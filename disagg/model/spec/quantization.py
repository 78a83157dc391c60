"""Quantized weights, as the configuration of a checkpoint describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Elements = Literal["fp8", "int8", "int4", "fp4"]
ScalesName = Literal["float32", "bfloat16", "float16", "float8_e8m0fnu"]
Storage = Literal["values", "packed", "gptq", "gptq_v2", "awq", "mxfp4"]

SUPPORTED = (
    "supported are fp8 (e4m3), GPTQ, AWQ and compressed-tensors with fp8, int8 or int4 weights, and one scale per "
    "tensor, channel, group or block, and MXFP4 for experts"
)
MXFP4_GROUP = 32
"""Number of inputs that share a scale in MXFP4."""


class UnsupportedQuantizationError(ValueError):
    """The kernels or the readers of checkpoints do not support a format; the message is the reason."""


@dataclass(frozen=True)
class Quantization:
    """The format of a checkpoint's quantized linear layers and experts. Other layers are not quantized."""

    storage: Storage
    """How the checkpoint stores values and scales; each has a reader in `disagg.model.load.quantized_tensors`."""
    elements: Elements
    block: tuple[int, int]
    """Output and input features that share a scale; 0 means all."""
    zeros: bool = False
    """Whether each scale has a zero point."""
    scales: ScalesName = "float32"
    """Type of the scales in memory."""

    def block_of(self, shape: tuple[int, int]) -> tuple[int, int]:
        """Returns `block` for a weight of `shape`: each 0 is replaced by the weight's size."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def least_cut(self, inputs: int) -> int:
        """Returns the number of inputs whose multiples may begin a rank's part of a weight with `inputs`."""
        if self.storage == "mxfp4":
            return MXFP4_GROUP
        return 16 if 0 < self.block[1] < inputs else 1


def quantization_of(config: Any) -> Quantization | None:
    """Returns the format of a transformers configuration; None if it names no quantization.

    Raises UnsupportedQuantizationError.
    """
    settings = getattr(config, "quantization_config", None)
    if not settings:
        return None
    if not isinstance(settings, Mapping):
        settings = settings.to_dict()
    method = str(settings.get("quant_method"))
    if method not in _METHODS:
        raise UnsupportedQuantizationError(f"its weights are quantized as {method}; {SUPPORTED}")
    return _METHODS[method](settings)


def _fp8(settings: Mapping[str, Any]) -> Quantization:
    """Reads the settings of DeepSeek, Qwen and Mistral checkpoints."""
    if (form := settings.get("fmt") or "e4m3") != "e4m3":
        raise UnsupportedQuantizationError(f"its weights are fp8 of type {form}; {SUPPORTED}")
    size = settings.get("weight_block_size") or (0, 0)
    return Quantization("values", "fp8", _block(size))


def _fbgemm_fp8(settings: Mapping[str, Any]) -> Quantization:
    return Quantization("values", "fp8", (1, 0))


def _compressed_tensors(settings: Mapping[str, Any]) -> Quantization:
    groups = list((settings.get("config_groups") or {}).values())
    weights = [group.get("weights") or {} for group in groups]
    if not weights or any(one != weights[0] for one in weights):
        count = len(weights)
        raise UnsupportedQuantizationError(
            f"its compressed-tensors settings describe {count} kinds of quantized weights; one is supported"
        )
    formats = {settings.get("format"), *(group.get("format") for group in groups)} - {None, "mixed-precision"}
    form, one = formats.pop() if len(formats) == 1 else str(sorted(formats)), weights[0]
    name = f"compressed-tensors {form}, {one.get('num_bits')} bits {one.get('type')}, {one.get('strategy')}"
    sparse = (settings.get("sparsity_config") or {}).get("format", "dense") != "dense"
    if sparse or settings.get("transform_config"):
        raise UnsupportedQuantizationError(f"its weights are {'sparse' if sparse else 'rotated'} ({name})")
    kind = (form, one.get("type"), one.get("num_bits"))
    block = _compressed_block(one)
    reordered = one.get("actorder") not in (None, False, *_ORDERS)
    if kind not in _COMPRESSED or block is None or reordered:
        order = f", actorder {one['actorder']}" if reordered else ""
        raise UnsupportedQuantizationError(f"its weights are quantized as {name}{order}; {SUPPORTED}")
    storage, elements = _COMPRESSED[kind]
    zeros = not one.get("symmetric", True)
    if zeros and (elements != "int4" or block[0] != 1):
        raise UnsupportedQuantizationError(f"its {elements} weights have zero points ({name}); {SUPPORTED}")
    return Quantization(storage, elements, block, zeros)


def _compressed_block(weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns the block of a strategy; None for an unknown strategy."""
    group = int(weights.get("group_size") or 0)  # -1: one group per channel
    strategy = weights.get("strategy") or ("group" if group else "tensor")
    if strategy == "block":
        return _block(weights.get("block_structure") or ())
    blocks = {"tensor": (0, 0), "channel": (1, 0), "group": (1, max(0, group))}
    return blocks.get(strategy)


def _gptq(settings: Mapping[str, Any]) -> Quantization:
    bits, symmetric = settings.get("bits"), bool(settings.get("sym", True))
    form = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    exceptions = [key for key in settings.get("dynamic") or {} if not str(key).startswith("-:")]
    for wrong, why in (
        (bits not in (4, 8), f"{bits} bits"),
        (bits == 8 and not symmetric, "8 bits with zero points (sym = false)"),
        (form not in ("gptq", "gptq_v2"), f"checkpoint_format {form}"),
        (settings.get("desc_act"), "columns in order of importance (desc_act = true)"),
        (exceptions, "other settings for some layers (dynamic)"),
    ):
        if wrong:
            raise UnsupportedQuantizationError(
                f"its weights are GPTQ with {why}; supported are 4 bits, and 8 bits with sym = true, with "
                f"desc_act = false, in the formats gptq and gptq_v2"
            )
    storage: Storage = "gptq" if form == "gptq" else "gptq_v2"
    return Quantization(storage, "int8" if bits == 8 else "int4", (1, _group(settings)), not symmetric)


def _awq(settings: Mapping[str, Any]) -> Quantization:
    bits = settings.get("bits", 4)
    version = str(settings.get("version") or settings.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm" or not settings.get("zero_point", True):
        raise UnsupportedQuantizationError(
            f"its weights are AWQ with {bits} bits, version {version}, zero_point {settings.get('zero_point')}; "
            "supported are 4 bits, version gemm, with zero points"
        )
    return Quantization("awq", "int4", (1, _group(settings)), True)


def _mxfp4(settings: Mapping[str, Any]) -> Quantization:
    """Reads the settings of gpt-oss checkpoints, in which the experts alone are quantized."""
    return Quantization("mxfp4", "fp4", (1, MXFP4_GROUP), scales="float8_e8m0fnu")


def _group(settings: Mapping[str, Any]) -> int:
    """Returns the size of groups; 0 for one group per channel, which is -1 in checkpoints."""
    return max(0, int(settings.get("group_size", 128)))


def _block(size: Any) -> tuple[int, int]:
    if not (isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(one, int) for one in size)):
        raise UnsupportedQuantizationError(f"its weights have scales of blocks {size}, not of two sizes")
    return int(size[0]), int(size[1])


_ORDERS = ("weight", "static")
"""Orders in which compressed-tensors quantizes columns, and then stores them in their own order."""
_COMPRESSED: dict[tuple[Any, ...], tuple[Storage, Elements]] = {
    ("float-quantized", "float", 8): ("values", "fp8"),
    ("naive-quantized", "float", 8): ("values", "fp8"),
    ("int-quantized", "int", 8): ("values", "int8"),
    ("naive-quantized", "int", 8): ("values", "int8"),
    ("pack-quantized", "int", 8): ("packed", "int8"),
    ("pack-quantized", "int", 4): ("packed", "int4"),
}
_METHODS = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm_fp8,
    "compressed-tensors": _compressed_tensors,
    "gptq": _gptq,
    "awq": _awq,
    "mxfp4": _mxfp4,
}
