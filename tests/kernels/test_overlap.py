"""Which launches overlap: those of steps with small hidden states, on GPUs that can."""

from __future__ import annotations

import pytest
import torch

from kernels.overlap import overlap, overlapping

GPU = torch.device("cuda:0")


def test_steps_of_one_row_up_to_a_limit_of_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kernels.overlap._supported", lambda device: device.type == "cuda")
    for rows, hidden, overlaps in ((1, 4096, True), (32, 4096, True), (33, 4096, False)):
        with overlapping(rows, hidden):
            assert overlap(GPU) == ({"OVERLAP": True, "launch_pdl": True} if overlaps else {"OVERLAP": False})
            assert overlap(torch.device("cpu")) == {"OVERLAP": False}
    with overlapping(1, 4096):
        with overlapping(33, 4096):
            assert not overlap(GPU)["OVERLAP"]
        assert overlap(GPU)["OVERLAP"]
    assert overlap(GPU) == {"OVERLAP": False}, "outside of any step"
