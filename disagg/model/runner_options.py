"""Options of a rank's model runner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from disagg.core.config.model import RecurrentName
from disagg.core.config.read import AttentionName, Role
from disagg.model.recurrent.state import no_states


@dataclass(frozen=True)
class RunnerOptions:
    """Types, sizes and kernels of one rank's runner."""

    dtype: torch.dtype
    """Type of weights and hidden states."""
    pool_tokens: int
    """Slots of the KV pool, including the trash page; rounded down to whole pages."""
    page_size: int
    """Number of token slots in a page."""
    rows: int
    """Largest number of requests that can have a block table row at the same time."""
    max_tokens: int
    """Most tokens of one request, prompt and answer together."""
    section: Role = "prefill"
    """Section of the configuration file that error messages name."""
    kv_dtype: torch.dtype | None = None
    """Type of the stored KV; None: `dtype`."""
    attention: AttentionName = "auto"
    """See `ModelConfig.attention`."""
    fused: bool = True
    """See `ModelConfig.fused`."""
    deterministic: bool = False
    """See `ModelConfig.deterministic`."""
    memory_bytes: int = 0
    """Memory for weights, states and KV. If set, `rows` is the largest number of rows, and the states of all rows may
    take `STATES_SHARE` of the memory that the weights leave."""
    cached_states: Callable[[int], int] = no_states
    """Function that returns the number of slots for cached recurrent states for a number of rows; unused by models
    without recurrent layers."""
    cached_states_bytes: int | None = None
    """Largest size of all slots for cached recurrent states; None: no limit."""
    recurrent_kernels: RecurrentName = "auto"
    """See `ModelConfig.recurrent_kernels`."""
