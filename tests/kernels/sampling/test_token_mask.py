"""`forbid_tokens` against plain Python; other rows and allowed tokens keep their bits."""

from __future__ import annotations

import pytest
import torch

from kernels.sampling.token_mask import forbid_reference, forbid_tokens, mask_words

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def packed(allowed: torch.Tensor) -> torch.Tensor:
    """Bool `[m, vocab]` as int32 words."""
    m, vocab = allowed.shape
    bits = torch.zeros(m, mask_words(vocab) * 32, dtype=torch.int64)
    bits[:, :vocab] = allowed.long()
    words = (bits.view(m, -1, 32) << torch.arange(32)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 259, 1024, 2500])
def test_forbidden_tokens_have_no_probability(vocab: int, device: str) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(5, vocab, generator=generator)
    logits[1, 0] = float("nan")
    allowed = torch.rand(3, vocab, generator=generator) < 0.5
    rows = torch.tensor([3, 1, 4])
    wanted = logits.clone()
    wanted[rows] = torch.where(allowed, logits[rows], float("-inf"))
    for forbid in (forbid_tokens, forbid_reference):
        found = logits.to(device)
        forbid(found, rows.to(device), packed(allowed).to(device))
        assert torch.equal(found.cpu().view(torch.int32), wanted.view(torch.int32))


@pytest.mark.parametrize(
    ("logits", "rows", "masks", "name"),
    [
        (torch.zeros(2, 40), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32), "masks"),
        (torch.zeros(2, 40), torch.tensor([0]), torch.zeros(1, 2), "masks"),
        (torch.zeros(2, 40), torch.tensor([0.0]), torch.zeros(1, 2, dtype=torch.int32), "rows"),
        (torch.zeros(2, 40).t(), torch.tensor([0]), torch.zeros(1, 1, dtype=torch.int32), "logits"),
    ],
)
def test_wrong_arguments(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        forbid_tokens(logits, rows, masks)
