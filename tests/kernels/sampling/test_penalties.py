"""Penalties change counted tokens of their rows only, by torch's bits; new tokens are counted.

`test_kernels_interpreted.py` runs this file again with the Triton kernels, in Triton's interpreter.
"""

from __future__ import annotations

import pytest
import torch

from kernels.sampling.penalties import Penalties, count_reference, count_tokens, penalise, penalise_reference

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]
VOCAB, ROWS = 1500, (3, 0, 4)


def penalties_on(device: str) -> Penalties:
    generator = torch.Generator().manual_seed(1)
    counts = [torch.randint(0, 6, (VOCAB,), generator=generator, dtype=torch.int32).to(device) for _ in ROWS]
    addresses = torch.tensor([one.data_ptr() for one in counts], device=device)
    factors = torch.tensor([[1.3, 0.2, -1.0], [0.7, -0.5, 0.3], [1.0, 0.0, 2.0]], device=device)
    return Penalties(torch.tensor(ROWS, device=device), counts, addresses, factors)


@pytest.mark.parametrize("device", DEVICES)
def test_penalties_are_torchs_to_the_last_bit(device: str) -> None:
    logits = 3 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0))
    found, expected = logits.clone().to(device), logits.clone()
    penalise(found, penalties_on(device))
    penalise_reference(expected, penalties_on("cpu"))
    assert torch.equal(found.cpu(), expected)
    for row in range(6):
        assert torch.equal(expected[row], logits[row]) == (row not in ROWS)
    untouched = torch.stack([one.cpu() == 0 for one in penalties_on(device).counts])
    assert torch.equal(expected[list(ROWS)][untouched], logits[list(ROWS)][untouched])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [count_tokens, count_reference])
def test_new_tokens_are_counted(run: object, device: str) -> None:
    penalties, before = penalties_on(device), penalties_on("cpu").counts
    assert callable(run)
    run(torch.tensor([5, 1, 2, 7, -1, 9], device=device), penalties)
    for counts, old, token in zip(penalties.counts, before, (7, 5, None), strict=True):
        changed = (counts.cpu() - old).nonzero()[:, 0].tolist()
        assert changed == ([] if token is None else [token])
        assert token is None or counts[token] == old[token] + 2


def test_bad_arguments() -> None:
    penalties, logits = penalties_on("cpu"), torch.zeros(6, VOCAB)
    with pytest.raises(ValueError, match="logits must be contiguous float32"):
        penalise(logits.double(), penalties)
    with pytest.raises(ValueError, match=r"counts must be contiguous int32 \[9\]"):
        penalise(torch.zeros(6, 9), penalties)
    for name in ("rows", "addresses", "factors"):
        with pytest.raises(ValueError, match=f"{name} must be contiguous"):
            penalise(logits, Penalties(**{**vars(penalties), name: torch.zeros(2)}))
