"""A norm over all heads, of which each rank has some."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.olmoe.modeling_olmoe import OlmoeRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from disagg.core.types import Span, head_span
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.split.attention_parts import IndivisibleError
from disagg.model.split.row_norm import SplitRowRMSNorm

HEADS, DIM = 4, 6


@pytest.mark.parametrize("size", [2, 3, 8])
@pytest.mark.parametrize("kind", [Olmo2RMSNorm, OlmoeRMSNorm])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_ranks_compute_the_norm_together(kind: Any, dtype: torch.dtype, size: int) -> None:
    """Three ranks have heads 0-1, 1-2 and 2-3; of eight ranks, two each have one head."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HEADS * DIM, generator=generator).to(dtype)
    norm = kind(HEADS * DIM).to(dtype)
    norm.weight.data.copy_(torch.rand(HEADS * DIM, generator=generator))

    def work(collective: ThreadCollective) -> tuple[Span, torch.Tensor]:
        own = head_span(collective.rank, size, HEADS)
        before = head_span(collective.rank - 1, size, HEADS).stop if collective.rank else 0
        part = Span(own.start * DIM, own.stop * DIM)
        split = SplitRowRMSNorm(norm, part, max(0, before - own.start) * DIM)
        split.collective = collective
        split.weight = nn.Parameter(norm.weight.detach()[part.start : part.stop].clone())
        return part, split(x[:, part.start : part.stop].contiguous()).detach()

    expected = norm(x).detach()
    for part, found in run_ranks(size, work):
        assert found.dtype == dtype
        tolerance = 1e-6 if dtype == torch.float32 else 1e-2
        torch.testing.assert_close(found, expected[:, part.start : part.stop], rtol=tolerance, atol=1e-6)


def test_a_norm_of_another_form_is_not_divided() -> None:
    with pytest.raises(IndivisibleError, match="the form of its Qwen3NextRMSNorm over all heads is unknown"):
        SplitRowRMSNorm(Qwen3NextRMSNorm(24), Span(0, 12), 0)
    with pytest.raises(IndivisibleError, match="the form of its LayerNorm"):
        SplitRowRMSNorm(nn.LayerNorm(24), Span(0, 12), 0)
