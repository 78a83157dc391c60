"""Which products of a model use the kernel of few rows, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from disagg.model.layers import few_rows
from disagg.model.layers.few_rows import FewRowsSwitch, use_few_rows
from disagg.model.layers.fused import fuse
from disagg.model.layers.merged import merge_projections, merged_of, projected, use_few_rows_merged
from kernels.layers.few_rows import FewRowsProduct
from kernels.layers.one_row import one_row

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets weights on a CPU use the product of 2 to 4 rows, which then runs in plain torch."""
    monkeypatch.setattr(few_rows, "most_rows_of", lambda weight, *, gated=False: 4)


@pytest.fixture
def one_row_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets weights on a CPU use the product of one row, which then runs in plain torch."""
    monkeypatch.setattr(few_rows, "takes_one_row", lambda weight: True)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    made: list[tuple[int, ...]] = []
    own = FewRowsProduct.__call__

    def call(self: FewRowsProduct, x: torch.Tensor) -> torch.Tensor:
        made.append(tuple(x.shape))
        return own(self, x)

    def call_one_row(x: torch.Tensor, **arguments: Any) -> torch.Tensor:
        made.append(tuple(x.shape))
        return one_row(x, **arguments)

    monkeypatch.setattr(FewRowsProduct, "__call__", call)
    monkeypatch.setattr(few_rows, "one_row", call_one_row)
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


@pytest.mark.usefixtures("one_row_everywhere")
@pytest.mark.parametrize("more", [False, True], ids=["", "and the kernel of more rows"])
def test_one_row(more: bool, calls: list[tuple[int, ...]], request: pytest.FixtureRequest) -> None:
    if more:
        request.getfixturevalue("everywhere")
    torch.manual_seed(0)
    layer, switch = nn.Linear(32, 48, dtype=torch.bfloat16), FewRowsSwitch()
    assert use_few_rows(nn.Sequential(layer), switch) == 1
    one, two, five = (torch.randn(1, rows, 32).bfloat16() for rows in (1, 2, 5))
    layer(one)
    assert not calls, "the switch is off"
    with switch.turned_on():
        assert torch.equal(layer(one), nn.functional.linear(one, layer.weight, layer.bias))
        layer(five)
        layer(five[:, :0])
        assert calls == [(1, 1, 32)]
        layer(two)
    assert calls == ([(1, 1, 32), (1, 2, 32)] if more else [(1, 1, 32)])


def test_without_kernels_layers_stay_as_they_are() -> None:
    assert use_few_rows(nn.Linear(32, 48, dtype=torch.bfloat16), FewRowsSwitch()) == 0


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


@pytest.fixture
def llama(checkpoint: Callable[[str], Path]) -> Any:
    """A model with merged projections."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint("llama"), dtype=torch.bfloat16)
    fuse(model)
    merge_projections(model)
    return model


def of_class(model: Any, name: str) -> list[Any]:
    return [module for module in model.modules() if type(module).__name__ == name]


@pytest.mark.usefixtures("everywhere")
def test_a_gated_mlp_is_one_product(llama: Any, calls: list[tuple[int, ...]]) -> None:
    mlps, attention = of_class(llama, "LlamaMLP"), of_class(llama, "LlamaAttention")
    x = torch.randn(1, 3, llama.config.hidden_size).bfloat16()
    expected = [mlp(x) for mlp in mlps]
    switch = FewRowsSwitch()
    assert use_few_rows_merged(llama, switch) == len(mlps)
    assert all(merged_of(one).gated is None for one in attention)  # type: ignore[union-attr]
    with switch.turned_on():
        assert all(torch.equal(mlp(x), one) for mlp, one in zip(mlps, expected, strict=True))
        for one in attention:
            projected(one, QKV, x)
    assert len(calls) == len(mlps), "queries, keys and values of several rows are multiplied by torch"


@pytest.mark.usefixtures("everywhere", "one_row_everywhere")
def test_merged_projections_of_one_row(llama: Any, calls: list[tuple[int, ...]]) -> None:
    mlps, attention = of_class(llama, "LlamaMLP"), of_class(llama, "LlamaAttention")
    x = torch.randn(1, 1, llama.config.hidden_size).bfloat16()
    expected = [mlp(x) for mlp in mlps], [projected(one, QKV, x) for one in attention]
    switch = FewRowsSwitch()
    assert use_few_rows_merged(llama, switch) == len(mlps) + len(attention)
    with switch.turned_on():
        assert all(torch.equal(mlp(x), one) for mlp, one in zip(mlps, expected[0], strict=True))
        assert len(calls) == len(mlps)
        for one, parts in zip(attention, expected[1], strict=True):
            assert all(
                torch.equal(part, same) for part, same in zip(projected(one, QKV, x), parts, strict=True)
            )
    assert len(calls) == len(mlps) + len(attention)
