"""Compares the kernels of quantized experts with torch on this device, before the first step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import structlog
import torch

from disagg.model.experts.grouped import difference, probed_steps
from disagg.model.experts.quantized import QuantizedExperts, quantized_forwards
from kernels.layers.expert_matmul import expert_tiles
from kernels.layers.expert_quantized import quantized_tiles
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile

log = structlog.get_logger(__name__)


def check_experts(model: Any) -> int:
    """Compares each form and shape of quantized experts in `model` with torch, with every tile.

    If results of the kernel that reads quantized weights differ, or the kernel fails, all steps convert the weights.
    If the kernels of converted weights are wrong too, torch computes one expert after another. The log has a warning.
    Returns the number of modules for which some kernel is wrong. Waits for the device.
    """
    found, wrong = dict[tuple[object, ...], tuple[bool, bool]](), 0
    for forward in quantized_forwards(model):
        weights = [one.parts.weight for one in (forward.up, forward.down)]
        forms = [(one.elements, one.shape, one.block, one.scales.dtype, one.zeros is None) for one in weights]
        kind = (type(forward.module), *forms, forward.up.dtype, weights[0].words.device)
        if kind not in found:
            found[kind] = _right_kernels(forward)
        forward.kernel, forward.grouped = found[kind]
        wrong += found[kind] != (True, True)
    if found:
        torch.cuda.empty_cache()  # frees the converted weights; does nothing on a CPU
    return wrong


@torch.inference_mode()
def _right_kernels(forward: QuantizedExperts) -> tuple[bool, bool]:
    """Returns whether the kernel of quantized weights, and the kernels of converted weights, agree with torch."""
    dtype = forward.up.dtype
    tiles = quantized_tiles(forward.up.parts, dtype)
    kernel = not tiles or _agree(forward, tiles, "every step converts the weights")
    otherwise = "torch computes one expert after another, in steps without recording"
    grouped = _agree(forward, expert_tiles(dtype), otherwise)
    return kernel, grouped


def _agree(forward: QuantizedExperts, tiles: Sequence[QuantizedTile | MatmulTile], otherwise: str) -> bool:
    """Returns whether the forward agrees with torch, with each of `tiles`. `otherwise`: what follows if not, for the
    log."""
    down, like = forward.down.parts, forward.up.scales.new_empty(0, dtype=forward.up.dtype)
    for step, tile in probed_steps(forward.module, forward.experts, down.outputs, like, tiles):
        wanted = forward.of_chosen(*step).float()
        if why := difference(partial(forward, *step, tile), wanted, like.dtype):
            name = type(forward.module).__name__
            log.warning("expert_kernels_disagree", module=name, why=why, then=otherwise)
            return False
    return True
