"""Forwards of experts with our kernels: a fixed number of launches, whatever the tokens choose.

A step reads the weights of the chosen experts once. The host makes no decision within a step, so steps can be
recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import structlog
import torch
from triton import TritonError

from disagg.core.errors import first_line
from disagg.model.experts.activation import Activation
from disagg.model.experts.form import DOWN, ExpertsForm, ExpertsFormError, experts_of, form_of
from kernels.dispatch import INTERPRETED
from kernels.layers.expert_matmul import expert_matmul, expert_tile, expert_tiles
from kernels.layers.expert_rows import expert_rows
from kernels.layers.expert_sum import expert_sum
from kernels.layers.matmul import DTYPES
from kernels.layers.matmul_tiles import MatmulTile
from kernels.layers.quantized_linear import QuantizedTile

Tile = TypeVar("Tile", bound=MatmulTile | QuantizedTile)
_PROBED_TOKENS, _PROBED_CHOICES = 3, 2
_ALLOWED = {torch.float32: 1e-4, torch.bfloat16: 4 * 2**-7, torch.float16: 4 * 2**-10}
"""Largest error of a token's result, relative to the norm of the result, that rounding and the order of sums
explain."""
log = structlog.get_logger(__name__)


class GroupedExperts:
    """The forward of a module of experts, in four launches and those of its activation."""

    def __init__(self, module: Any, form: ExpertsForm) -> None:
        up, down = getattr(module, form.up).detach(), getattr(module, DOWN).detach()
        self._up, self._down = (one.transpose(1, 2) if form.transposed else one for one in (up, down))
        biases = [f"{name}_bias" for name in (form.up, DOWN)]
        self._up_bias, self._down_bias = (
            getattr(module, name).detach() if form.has_bias else None for name in biases
        )
        self._activation = Activation(module, form)

    def __call__(
        self,
        hidden_states: torch.Tensor,
        chosen: torch.Tensor,
        weights: torch.Tensor,
        tile: MatmulTile | None = None,
    ) -> torch.Tensor:
        """Returns the weighted sum of the chosen experts' results: `[tokens, hidden]`.

        `hidden_states`: `[tokens, hidden]`. `chosen`: numbers of experts, `[tokens, choices]`; a number beyond the
        last expert chooses none. `weights`: one for each choice. `tile`: derived from the sizes if omitted.
        """
        choices, experts = chosen.shape[1], self._up.shape[0]
        dtype, chosen = self._up.dtype, chosen.contiguous()
        tile = tile or expert_tile(chosen.numel(), experts, dtype)
        rows = expert_rows(chosen, experts, tile.rows)
        x = expert_matmul(hidden_states.to(dtype), self._up, rows, choices, self._up_bias, tile=tile)
        x = self._activation(x)
        x = expert_matmul(x.to(dtype), self._down, rows, 1, self._down_bias, tile=tile)
        if weights.dtype not in (dtype, torch.float32):
            weights = weights.float()
        return expert_sum(x, weights.contiguous(), chosen, experts).to(hidden_states.dtype)


def group_experts(model: Any) -> int:
    """Replaces the `forward` of each module of experts whose form is known; returns the number of these modules.

    Call this after the weights are loaded. Modules keep their own forward, with a warning in the log, if the kernels
    give other results on this device.
    """
    grouped, agreements = 0, dict[tuple[object, ...], bool]()
    for _, module in experts_of(model):
        try:
            form = form_of(module)
        except ExpertsFormError:
            continue
        if "forward" not in vars(module) and getattr(module, DOWN).dtype in DTYPES:
            forward, weights = GroupedExperts(module, form), getattr(module, form.up)
            kind = (type(module), form, weights.shape, weights.dtype, weights.device)
            if kind not in agreements:
                agreements[kind] = agrees(module, forward, weights)
            if agreements[kind]:
                module.forward = forward
                grouped += 1
    return grouped


class ProbedStep(NamedTuple):
    """Arguments of a module of experts: random tokens, their choices, and the weights of the choices."""

    x: torch.Tensor
    chosen: torch.Tensor
    factors: torch.Tensor


def probed_steps(
    module: Any, experts: int, hidden: int, like: torch.Tensor, tiles: Sequence[Tile]
) -> Iterator[tuple[ProbedStep, Tile]]:
    """Yields random steps and the tile for each: a few tokens of any experts, then, for each tile, many tokens of a
    few experts.

    `like`: a tensor of the type and device of the activations.
    """
    # As many choices as in the model's steps, so that steps need no other compiled kernels.
    configured = getattr(module.config, "num_experts_per_tok", None)  # HunYuan: a list, by layer
    choices = min(experts, max(1, configured) if isinstance(configured, int) else _PROBED_CHOICES)
    own = torch.Generator().manual_seed(0)  # torch's own generator is not changed
    few = min(experts, choices + 2)
    some = torch.arange(few) * (experts - 1) // max(1, few - 1)  # includes the first and the last one
    # The mean number of rows of an expert exceeds a block.
    full = ((tile.rows * few // choices + _PROBED_TOKENS, some, tile) for tile in tiles)
    probes = [(_PROBED_TOKENS, torch.arange(experts), tiles[0]), *full]
    for tokens, numbers, tile in probes[:1] if INTERPRETED else probes:  # many tokens would take minutes
        x = torch.randn(tokens, hidden, generator=own).to(like.device, like.dtype)
        order = torch.rand(tokens, len(numbers), generator=own).argsort(1)[:, :choices]
        factors = torch.rand(tokens, choices, generator=own).to(like.device, like.dtype)
        yield ProbedStep(x, numbers[order].to(like.device), factors), tile


def difference(found: Callable[[], torch.Tensor], wanted: torch.Tensor, dtype: torch.dtype) -> str:
    """Returns how the results of `found` differ from `wanted`, by more than rounding to `dtype` explains, or why
    `found` fails; empty if they agree."""
    try:
        errors = (found().float() - wanted).norm(dim=1)
        error = float((errors / wanted.norm(dim=1).clamp_min(1e-30)).max())
        why = f"a token's result differs by {error:.2g} of its norm"
    except (RuntimeError, ValueError, TritonError) as exc:
        error, why = math.inf, first_line(exc)
    return "" if error <= _ALLOWED[dtype] else why


@torch.inference_mode()
def agrees(module: Any, forward: GroupedExperts, weights: torch.Tensor) -> bool:
    """Returns whether `forward` and the module's own forward give random tokens the same results, but for rounding.

    Compares the steps of `probed_steps` with each tile. Waits for the device. Logs a warning if results differ or a
    forward fails. If the module's own forward fails, there is nothing to compare with, nor to use instead: the result
    is True.
    """
    tiles = expert_tiles(weights.dtype)
    hidden = getattr(module, DOWN).shape[2 if module.is_transposed else 1]
    name = type(module).__name__
    for step, tile in probed_steps(module, weights.shape[0], hidden, weights, tiles):
        try:
            wanted = module.forward(*step).float()
        except (RuntimeError, ValueError) as exc:
            log.warning("expert_kernels_not_compared", module=name, why=first_line(exc), then="used")
            return True
        if why := difference(partial(forward, *step, tile), wanted, weights.dtype):
            log.warning("expert_kernels_disagree", module=name, why=why, then="not used")
            return False
    return True
