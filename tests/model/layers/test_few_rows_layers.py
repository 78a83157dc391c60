"""Which products of a model use the kernel of few rows, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from disagg.model.layers import few_rows, merged
from disagg.model.layers.few_rows import FewRowsSwitch, use_few_rows
from disagg.model.layers.fused import fuse
from disagg.model.layers.merged import gate_few_rows, merge_projections
from kernels.layers.few_rows import FewRowsProduct


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets weights on a CPU use the product, which then runs in plain torch, for up to four rows."""
    monkeypatch.setattr(few_rows, "most_rows_of", lambda weight, *, gated=False: 4)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = []
    own = FewRowsProduct.__call__

    def call(self: FewRowsProduct, x: torch.Tensor) -> torch.Tensor:
        made.append(tuple(x.shape))
        return own(self, x)

    monkeypatch.setattr(FewRowsProduct, "__call__", call)
    return made


@pytest.mark.usefixtures("everywhere")
def test_only_few_rows_while_the_switch_is_on(calls: list[tuple[int, ...]]) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(32, 48, dtype=torch.bfloat16)
    model, switch = nn.Sequential(layer), FewRowsSwitch()
    assert use_few_rows(model, switch) == 1
    few, many = (torch.randn(1, rows, 32).bfloat16() for rows in (4, 5))
    expected = nn.functional.linear(few, layer.weight, layer.bias)
    assert torch.equal(model(few), expected)
    assert not calls
    with switch.turned_on():
        model(many)
        model(few.float().to(torch.bfloat16).transpose(1, 2).contiguous().transpose(1, 2))
        model(few[:, :1])
        assert not calls, "more rows, a single one, or not contiguous"
        assert torch.equal(model(few), expected)
    assert calls == [(1, 4, 32)]
    model(few)
    assert len(calls) == 1, "the switch is off again"


def test_the_switch_is_off_after_an_error() -> None:
    switch = FewRowsSwitch()

    def compute(numbers: torch.Tensor) -> torch.Tensor:
        assert switch.on
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        switch.wrapped(compute)(torch.zeros(1))
    assert not switch.on


@pytest.mark.usefixtures("everywhere")
def test_layers_with_a_forward_of_their_own_keep_it() -> None:
    own, other = (nn.Linear(32, 32, dtype=torch.bfloat16) for _ in "12")
    own.forward = lambda x: x  # type: ignore[method-assign]
    assert use_few_rows(nn.ModuleList([own, other]), FewRowsSwitch()) == 1
    assert float(own(torch.ones(1)).sum()) == 1.0


@pytest.mark.usefixtures("everywhere")
def test_a_gated_mlp_is_one_product(checkpoint: Callable[[str], Path], calls: list[tuple[int, ...]]) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16)
    fuse(model)
    merge_projections(model)
    mlps = [module for module in model.modules() if type(module).__name__ == "LlamaMLP"]
    x = torch.randn(1, 3, model.config.hidden_size).bfloat16()
    expected = [mlp(x) for mlp in mlps]
    switch = FewRowsSwitch()
    assert gate_few_rows(model, switch) == len(mlps)
    attention = [module for module in model.modules() if type(module).__name__ == "LlamaAttention"]
    assert all(merged.merged_of(one).gated is None for one in attention)  # type: ignore[union-attr]
    with switch.turned_on():
        assert all(torch.equal(mlp(x), one) for mlp, one in zip(mlps, expected, strict=True))
    assert len(calls) == len(mlps)
