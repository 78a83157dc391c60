"""Products of experts: the order of rows, grouped products and weighted sums, against plain torch.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from slow_parameters import sampled

from kernels.dispatch import INTERPRETED
from kernels.layers.expert_matmul import expert_matmul, expert_matmul_reference, expert_tile
from kernels.layers.expert_rows import UNUSED, ExpertRows, expert_rows, expert_rows_reference, most_blocks
from kernels.layers.expert_sum import expert_sum, expert_sum_reference
from kernels.layers.matmul_tiles import MatmulTile

torch.set_num_threads(1)
pytestmark = pytest.mark.usefixtures("poison_empty")
DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TILES = (
    MatmulTile(16, 32, 32, stages=3),
    MatmulTile(16, 32, 64, stages=3, transposed=True),
    MatmulTile(32, 64, 32, stages=3),
)
# Tokens, experts, choices: no token, one token, fewer pairs than experts, many pairs of few experts.
SHAPES = [(0, 4, 2), (1, 5, 2), (3, 20, 8), (70, 3, 2), (600, 5, 4)]


def choose(tokens: int, experts: int, choices: int, device: str, skewed: bool = False) -> torch.Tensor:
    """Different experts for each token; `skewed`: no token chooses the last third of the experts."""
    generator = torch.Generator().manual_seed(tokens + experts)
    scores = torch.rand(tokens, experts, generator=generator)
    if skewed:
        scores[:, max(choices, experts - experts // 3) :] = -1.0
    return scores.topk(choices, dim=1).indices.contiguous().to(device)


def check_rows(rows: ExpertRows, chosen: torch.Tensor, experts: int, block_rows: int) -> None:
    flat = chosen.reshape(-1).tolist()
    owners, blocks = rows.owners.tolist(), rows.pairs.view(-1, block_rows).tolist()
    used = sum(owner != UNUSED for owner in owners)
    assert owners == sorted(owners[:used]) + [UNUSED] * (len(owners) - used)
    found: list[int] = []
    for owner, block in zip(owners[:used], blocks[:used], strict=True):
        own = [pair for pair in block if pair != UNUSED]
        assert own, "a block has at least one pair"
        assert block == own + [UNUSED] * (block_rows - len(own))
        assert all(flat[pair] == owner for pair in own)
        found += own
    assert sorted(found) == [pair for pair, expert in enumerate(flat) if expert < experts]
    assert found == sorted(found, key=lambda pair: (flat[pair], pair))
    assert used == sum(-(-flat.count(expert) // block_rows) for expert in range(experts))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(("tokens", "experts", "choices"), SHAPES)
def test_pairs_are_ordered_by_expert(
    tokens: int, experts: int, choices: int, skewed: bool, device: str
) -> None:
    chosen = choose(tokens, experts, choices, device, skewed)
    chosen[1::7] = experts  # no expert
    for ids, block_rows in ((chosen, 16), (chosen.int(), 64)):
        check_rows(expert_rows(ids, experts, block_rows), chosen, experts, block_rows)


def test_no_choice_needs_more_blocks_than_the_host_reserves() -> None:
    for pairs, experts, block_rows in ((1, 1, 16), (40, 3, 16), (512, 128, 16), (8, 128, 16), (100, 7, 32)):
        worst = 0
        for hit in range(
            1, min(pairs, experts) + 1
        ):  # one pair for each of `hit` experts, the rest for the first
            counts = [pairs - hit + 1, *[1] * (hit - 1)]
            worst = max(worst, sum(-(-count // block_rows) for count in counts))
        assert worst <= most_blocks(pairs, experts, block_rows) <= worst + 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("tile", "dtype", "tokens"),
    sampled(
        itertools.product(range(len(TILES)), DTYPES, (1, 40)),
        lambda tile, dtype, tokens: (tile == 0 or dtype == torch.float32) and tokens == 40,
    ),
)
def test_a_row_is_multiplied_by_its_expert(tile: int, dtype: torch.dtype, tokens: int, device: str) -> None:
    check_product(TILES[tile], dtype, tokens, device)


def check_product(tile: MatmulTile, dtype: torch.dtype, tokens: int, device: str) -> None:
    experts, choices = 3, 2
    generator = torch.Generator().manual_seed(0)
    n, k = 40, 72
    x = torch.randn(tokens, k, generator=generator).to(device, dtype)
    weights = torch.randn(experts, n, k, generator=generator).to(device, dtype)
    bias = torch.randn(experts, n, generator=generator).to(device, dtype)
    chosen = choose(tokens, experts, choices, device)
    rows = expert_rows(chosen, experts, tile.rows)
    pairs = torch.arange(tokens * choices, device=device)
    wide = torch.einsum("pk,pnk->pn", x[pairs // choices].double(), weights[chosen.reshape(-1)].double())
    for run in (expert_matmul, expert_matmul_reference):
        found = run(x, weights, rows, choices, tile=tile)
        assert_close(found, wide, dtype)
        assert_close(
            run(x, weights, rows, choices, bias, tile=tile), wide + bias[chosen.reshape(-1)].double(), dtype
        )
        transposed = weights.transpose(1, 2).contiguous().transpose(1, 2)
        assert_close(run(x, transposed, rows, choices, tile=tile), wide, dtype)
        again = run(found, weights.transpose(1, 2)[..., :n], rows, 1, tile=tile)  # one row for each pair
        other = torch.einsum(
            "pk,pnk->pn", found.double(), weights.transpose(1, 2)[chosen.reshape(-1)].double()
        )
        assert_close(again, other, dtype, 8.0)


def assert_close(found: torch.Tensor, wide: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 5e-3}[dtype]
    assert found.dtype == dtype
    assert torch.allclose(found.double(), wide, rtol=tolerance, atol=scale * 8 * tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "choices", "columns"), [(0, 2, 8), (1, 1, 5), (3, 8, 1030), (5, 3, 64)])
def test_sums_are_weighted(tokens: int, choices: int, columns: int, dtype: torch.dtype, device: str) -> None:
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter truncates to bfloat16; float16 takes the same way")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens * choices, columns, generator=generator).to(device, dtype)
    for weights_dtype in {dtype, torch.float32}:
        weights = torch.rand(tokens, choices, generator=generator).to(device, weights_dtype)
        chosen = torch.arange(tokens * choices, device=device).view(tokens, choices) % 9
        x[(chosen == 8).flatten()] = torch.nan  # no expert
        found = expert_sum(x, weights, chosen, 8)
        assert torch.equal(found, expert_sum_reference(x, weights, chosen, 8))
        rows = x.double().nan_to_num(nan=0.0).view(tokens, choices, columns)
        assert_close(found, (rows * weights.double().unsqueeze(-1)).sum(1), dtype)


def test_tiles_have_blocks_of_an_expert_s_mean_number_of_rows() -> None:
    rows = [expert_tile(tokens * 8, 128, torch.bfloat16).rows for tokens in (1, 64, 256, 512, 1024, 8192)]
    assert rows == [16, 16, 16, 32, 64, 128]
    assert [expert_tile(pairs, 4, torch.float32).rows for pairs in (8, 100, 10**5)] == [16, 32, 32]


def test_arguments_that_do_not_fit_are_refused() -> None:
    chosen, tile = choose(3, 5, 2, "cpu"), TILES[0]
    rows = expert_rows_reference(chosen, 5, 16)
    x, weights = torch.ones(3, 8), torch.ones(5, 4, 8)
    with pytest.raises(ValueError, match="chosen must be int64 or int32"):
        expert_rows(chosen.float(), 5, 16)
    with pytest.raises(ValueError, match="block_rows = 24 a power of two"):
        expert_rows(chosen, 5, 24)
    with pytest.raises(ValueError, match="x and weights must be"):
        expert_matmul(x.half(), weights, rows, 2, tile=tile)
    with pytest.raises(ValueError, match="blocks of 16 rows; the tile has 32"):
        expert_matmul(x, weights, rows, 2, tile=TILES[2])
    with pytest.raises(ValueError, match="bias must be contiguous"):
        expert_matmul(x, weights, rows, 2, torch.ones(5, 8), tile=tile)
    with pytest.raises(ValueError, match="x must be float32"):
        expert_sum(x.int(), torch.ones(3, 1), torch.ones(3, 1), 5)
    with pytest.raises(ValueError, match="weights must be contiguous"):
        expert_sum(x, torch.ones(2, 2), chosen, 5)
    with pytest.raises(ValueError, match="chosen must be integers"):
        expert_sum(x, torch.ones(3, 1), chosen, 5)
