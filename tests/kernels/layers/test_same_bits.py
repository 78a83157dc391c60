"""A row's result has the same bits whatever tile computes it, and whatever else the launch holds.

The promise of `model.deterministic`, kernel by kernel: on a GPU, in all tiles that the kernels may choose; elsewhere
the references.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from disagg.kv.pool import MHATokenToKVPool
from kernels.attention.common import AttentionParams
from kernels.attention.decode import decode_attention
from kernels.attention.layer_kv import QUANTIZED
from kernels.attention.prefill import PackedQueries, PrefillTile, prefill_attention
from kernels.attention.splits import Splits, fixed_splits
from kernels.layers import matmul_tiles
from kernels.layers.linear import Linear
from kernels.layers.matmul import grouped_matmul, matmul
from kernels.layers.matmul_tiles import tiles
from kernels.layers.row_sum import row_sum

CUDA = pytest.param("cuda:0", marks=pytest.mark.gpu)
TOKENS = 2500
"""Of a context: three fixed splits."""


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_of_a_product_alone_and_among_others(device: str, dtype: torch.dtype) -> None:
    rows, k, n = (40, 96, 70) if device == "cpu" else (700, 4096, 1030)
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((rows, k), (n, k), (n,))
    )
    linear = Linear(weight, bias)
    whole = linear(x)
    exact = x.double() @ weight.double().t() + bias.double()
    error = (whole.double() - exact).norm() / exact.norm()
    assert error < torch.finfo(dtype).eps + k**0.5 * torch.finfo(torch.float32).eps
    for first, count in ((0, 1), (3, 2), (5, 7), (8, 20), (1, rows - 1), (30, 10)):
        for _ in "12":  # compiled, and as it was compiled
            assert torch.equal(linear(x[first : first + count]), whole[first : first + count])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [4096, 1032])
def test_all_tiles_of_a_product(dtype: torch.dtype, k: int) -> None:
    left, right = (torch.randn(1, *shape, device="cuda:0", dtype=dtype) for shape in ((333, k), (520, k)))
    found = [matmul(left, right.transpose(1, 2), tile=tile) for tile in tiles(dtype, left.device)]
    assert all(torch.equal(one, found[0]) for one in found)


def test_tiles_fit_into_99_kib_of_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """As programs have on Ada and most Ampere GPUs."""
    device, most = torch.device("cuda:0"), 99 << 10
    for name, value in (("shared_bytes", most), ("multiprocessors", 58), ("has_tma", False)):
        monkeypatch.setattr(matmul_tiles, name, lambda _, value=value: value)
    found = tiles(torch.bfloat16, device)
    assert all(tile.shared_bytes <= most for tile in found)
    for rows in (1, 33, 64, 100, 5000):
        for columns in (512, 4096):
            assert matmul_tiles.tile_of.__wrapped__(rows, columns, torch.bfloat16, device, False) in found


@pytest.mark.gpu
def test_a_batch_of_products_with_any_strides() -> None:
    left = torch.randn(5, 64, 33, device="cuda:0", dtype=torch.bfloat16).transpose(1, 2)
    right = torch.randn(5, 40, 64, device="cuda:0", dtype=torch.bfloat16).transpose(1, 2)
    whole = matmul(left, right)
    for number in range(5):
        one = matmul(left[number : number + 1, 7:9].contiguous(), right[number : number + 1].contiguous())
        assert torch.equal(one[0], whole[number, 7:9])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_rows_of_several_matrices(device: str) -> None:
    left, right = torch.randn(50, 64, device=device), torch.randn(4, 64, 40, device=device)
    ends = torch.tensor([7, 7, 49, 50], dtype=torch.int32, device=device)
    found = grouped_matmul(left, right, ends)
    for row, matrix in ((0, 0), (6, 0), (7, 2), (48, 2), (49, 3)):
        assert torch.equal(found[row], matmul(left[None, row : row + 1], right[None, matrix])[0, 0])
        torch.testing.assert_close(found[row], left[row] @ right[matrix], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", ["cpu", CUDA])
@pytest.mark.parametrize("n", [1, 96, 5000])
def test_sums_of_rows(n: int, device: str) -> None:
    x = torch.randn(9, n, device=device)
    found = row_sum(x)
    torch.testing.assert_close(found, x.double().sum(-1).float(), rtol=1e-4, atol=1e-3)
    assert torch.equal(row_sum(x[3:4]), found[3:4])
    assert torch.equal(row_sum(x.view(3, 3, n)), found.view(3, 3))


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, w = torch.zeros(1, 3, 8), torch.zeros(1, 8, 5)
    with pytest.raises(ValueError, match="of one type"):
        matmul(x, w.to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"\[batch, k, n\]"):
        matmul(x, w[:, :7])
    with pytest.raises(ValueError, match=r"bias must be contiguous torch.float32 \[5\]"):
        matmul(x, w, torch.zeros(4))
    with pytest.raises(ValueError, match="weight must be contiguous"):
        Linear(torch.zeros(4, 6).t())
    with pytest.raises(ValueError, match=r"ends int32 \[1\]"):
        grouped_matmul(x[0], w, torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="x must be float32"):
        row_sum(torch.zeros(3, dtype=torch.int64))


@dataclass(frozen=True)
class Case:
    k_dim: int = 128
    v_dim: int = 128
    group: int = 4
    kv_dtype: torch.dtype = torch.bfloat16
    dtype: torch.dtype = torch.bfloat16
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False


CASES = {
    "plain": Case(),
    "window": Case(window=700),
    "small window": Case(window=50, sinks=True),
    "soft cap and sinks": Case(softcap=30.0, sinks=True),
    "latent attention's heads": Case(192, 128, group=1),
    "heads of 256": Case(256, 256, group=2),
    "heads of 64, one group": Case(64, 64, group=8),
    "int8": Case(kv_dtype=torch.int8),
    "e4m3": Case(kv_dtype=torch.float8_e4m3fn, window=700),
    "float16": Case(dtype=torch.float16, kv_dtype=torch.float16),
    "float32": Case(dtype=torch.float32, kv_dtype=torch.float32),
}


class Context:
    """One sequence of `TOKENS` tokens in a pool, and noise as queries."""

    def __init__(self, case: Case) -> None:
        self.case, self.device = case, torch.device("cuda:0")
        generator = torch.Generator(self.device).manual_seed(1)
        kv_heads, dim = 2, max(case.k_dim, case.v_dim)
        self.pool = MHATokenToKVPool(1, 2 * TOKENS, kv_heads, dim, case.kv_dtype, self.device)
        self.table = torch.randperm(2 * TOKENS, generator=generator, device=self.device).int()[None, :TOKENS]
        self.table = self.table.repeat(4, 1).contiguous()
        shape = (TOKENS, kv_heads, dim)
        k, v = (torch.randn(shape, generator=generator, device=self.device).to(case.dtype) for _ in "kv")
        self.pool.write(0, self.table[0].long(), k, v)
        q_heads = kv_heads * case.group
        self.q = torch.randn(TOKENS, q_heads, case.k_dim, generator=generator, device=self.device).to(
            case.dtype
        )
        sinks = torch.randn(q_heads, generator=generator, device=self.device) if case.sinks else None
        self.params = AttentionParams(case.k_dim**-0.5, case.window, case.softcap, sinks)

    def numbers(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, device=self.device)

    def chunk(
        self, start: int, count: int, splits: Splits | None = None, tile: PrefillTile | None = None
    ) -> torch.Tensor:
        queries = PackedQueries(*(self.numbers(number) for number in (0, 0, start, count)), count)
        out = self.q.new_full((count, self.q.shape[1], self.case.v_dim), float("nan"))
        q = self.q[start : start + count]
        prefill_attention(
            q,
            self.pool.layer(0),
            self.table,
            queries,
            self.params,
            out,
            deterministic=True,
            splits=splits,
            tile=tile,
        )
        return out

    def singles(self, positions: list[int]) -> torch.Tensor:
        out = self.q.new_full((len(positions), self.q.shape[1], self.case.v_dim), float("nan"))
        where = self.numbers(*positions)
        rows = torch.arange(len(positions), device=self.device) % len(self.table)
        decode_attention(
            self.q[where],
            self.pool.layer(0),
            self.table,
            rows,
            where + 1,
            self.params,
            out,
            deterministic=True,
        )
        return out

    def tiles(self) -> Iterator[PrefillTile]:
        if self.case.dtype == torch.float32:
            yield from (PrefillTile(32, 16, 8, 2), PrefillTile(16, 16, 4, 2))
        elif max(self.case.k_dim, self.case.v_dim) > 128:
            yield from (PrefillTile(16, 32, 4, 2), PrefillTile(64, 32, 4, 2))
        else:
            yield from (PrefillTile(rows, 64, 4 if rows <= 64 else 8, 2) for rows in (16, 32, 64, 128))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_a_token_in_any_chunk_tile_and_kernel(name: str) -> None:
    context = Context(CASES[name])
    whole = context.chunk(0, TOKENS)
    assert bool(whole.isfinite().all())
    parallel = fixed_splits(TOKENS, window=True)
    for start, count in ((0, 64), (1000, 50), (1023, 2), (2047, 1), (2000, 500), (17, 1), (1400, 1100)):
        part = whole[start : start + count]
        assert torch.equal(context.chunk(start, count), part), (start, count)
        for tile in context.tiles():
            assert torch.equal(context.chunk(start, count, None, tile), part), (start, count, tile)
            assert torch.equal(context.chunk(start, count, parallel, tile), part), (start, count, tile)
    for positions in ([0], [2499], [1023, 1024, 1025], list(range(40, TOKENS, 9))):
        assert torch.equal(context.singles(positions), whole[positions]), positions


@pytest.mark.gpu
def test_fixed_splits_change_no_more_than_rounding() -> None:
    context = Context(Case())
    exact = Context(Case(dtype=torch.float32, kv_dtype=torch.float32))
    exact.q, exact.table = context.q.float(), context.table
    exact.pool.buffer.copy_(context.pool.buffer.float())
    found, wanted = context.chunk(0, TOKENS), exact.chunk(0, TOKENS)
    assert float((found.float() - wanted).norm() / wanted.norm()) < 2 * torch.finfo(torch.bfloat16).eps
    assert context.pool.dtype not in QUANTIZED
