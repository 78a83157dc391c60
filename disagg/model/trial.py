"""Trial steps: run a model before its first request, to check that it is supported and which steps it allows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from disagg.core.errors import UnsupportedModelError, first_line
from disagg.kv.upload import upload
from disagg.model.attention.paged import AttentionContext
from disagg.model.attention.probe import ShapeProbe
from disagg.model.head import ModelHead
from disagg.model.layers.kept_rows import KeptRows
from disagg.model.recurrent.request_cache import StateCache

Run = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | int, AttentionContext, StateCache | None], torch.Tensor
]
"""Function of ids, positions, `keep`, attention context and cache that returns logits; see `TrialSteps.logits`."""


class TrialSteps:
    """Runs a rank's part of a model over a few tokens, with ids from 0 on."""

    def __init__(self, run: Run, architecture: str, device: torch.device) -> None:
        """`architecture`: the name of the model in errors."""
        self._run, self._architecture, self._device = run, architecture, device

    def logits(
        self, probe: ShapeProbe, cache: StateCache | None, tokens: int = 1, keep: torch.Tensor | int = 1
    ) -> torch.Tensor:
        """Returns the logits of a step of `tokens` tokens. `keep`: the positions of the logits, or their number from
        the end (transformers' `logits_to_keep`).

        `probe` records the attention calls. Raises a one-line UnsupportedModelError if the model fails, but not if
        the memory is too small.
        """
        ids = positions = upload(list(range(tokens)), self._device)[None]
        try:
            return self._run(ids, positions, keep, probe, cache)
        except UnsupportedModelError:
            raise
        except ValueError as exc:  # raised by models that reject the cache
            raise UnsupportedModelError(f"{self._architecture} is not supported: {exc}") from exc
        except torch.OutOfMemoryError:
            raise
        except (LookupError, AttributeError, TypeError, RuntimeError) as exc:
            raise UnsupportedModelError(
                f"{self._architecture} is not supported: a trial step with the paged attention fails: "
                f"{first_line(exc)}"
            ) from exc

    def head_runs_alone(self, head: ModelHead, cache: StateCache | None, whole: torch.Tensor) -> bool:
        """Returns whether the model's head can run alone, with the logits `whole` of a pass over one token."""
        if not head.is_separate:
            return False
        look = partial(self.logits, ShapeProbe(), cache)
        try:
            with head.after_one_pass():
                again, alone = look(), look(keep=upload([0], self._device))
        except UnsupportedModelError:
            return False
        same = alone.shape == again.shape and torch.allclose(alone, again, rtol=1e-3, atol=1e-3)
        return same and _alike(again, whole)

    def keeps_rows(self, kept: KeptRows, make: Callable[[], StateCache | None]) -> bool:
        """Returns whether the logits of two of four tokens stay the same if the last layer returns only their rows.

        `make` returns the cache of a pass.
        """

        def logits(*keep: int) -> torch.Tensor:
            return self.logits(ShapeProbe(), make(), 4, upload(keep, self._device))

        try:
            every = logits(0, 1, 3)[1:]
            kept.enabled = True
            found = logits(1, 3)
        except UnsupportedModelError:
            return False
        finally:
            kept.enabled = False
        return found.shape == every.shape and _alike(found, every)


def _alike(logits: torch.Tensor, others: torch.Tensor) -> bool:
    """Returns whether the logits of two passes differ at most by the rounding of a 16-bit type."""
    differ = (logits - others).nan_to_num(nan=0.0).abs().max()  # logits of minus infinity differ by 0
    return bool(differ <= 0.1 * others.abs().max())
