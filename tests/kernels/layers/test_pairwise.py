"""Pairwise sums on a CPU: their bits depend neither on other rows nor on zeros behind the last element."""

from __future__ import annotations

import pytest
import torch

from kernels.layers import pairwise
from kernels.layers.pairwise import pairwise_product, pairwise_sum


@pytest.mark.parametrize("n", [0, 1, 2, 3, 5, 8, 33, 136])
def test_sums_with_zeros_behind(n: int) -> None:
    x = torch.randn(n, 7)
    found = pairwise_sum(x)
    torch.testing.assert_close(found, x.double().sum(0).float(), rtol=1e-5, atol=1e-5)
    for zeros in (1, 3, 200):
        assert torch.equal(pairwise_sum(torch.cat([x, torch.zeros(zeros, 7)])), found)
    for column in range(7):
        assert torch.equal(pairwise_sum(x[:, column].clone()), found[column])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_alone_and_padded(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one piece and in several, of any strides, and with other rows and zeros beside."""
    left = torch.randn(6, 29, 5).to(dtype).transpose(1, 2)
    right = torch.randn(6, 11, 29).to(dtype).transpose(1, 2)
    whole = pairwise_product(left, right)
    exact = left.double() @ right.double()
    assert (whole.double() - exact).norm() / exact.norm() < 2 * torch.finfo(dtype).eps
    longer = [torch.cat([left, left.new_zeros(6, 5, 8)], 2), torch.cat([right, right.new_ones(6, 8, 11)], 1)]
    assert torch.equal(pairwise_product(*longer), whole)
    monkeypatch.setattr(pairwise, "MOST_TERMS", 500)
    assert torch.equal(pairwise_product(left, right), whole)
    assert torch.equal(pairwise_product(left[2:3, 4:], right[2:3]), whole[2:3, 4:])
    assert pairwise_product(left[:0], right[:0]).shape == (0, 5, 11)
