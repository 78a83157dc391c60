"""The benchmark of the attention kernels: small sizes in Triton's interpreter, and its refusals."""

from __future__ import annotations

import pytest
import torch

from disagg.bench.kernels import attention as bench
from disagg.bench.kernels.attention import AttentionBench
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from kernels.dispatch import INTERPRETED

CPU = torch.device("cpu")
SMALL = {
    "decodes": ((2, 20),),
    "prompt_tokens": 17,
    "question_tokens": 3,
    "written_tokens": 6,
    "kv_heads": 2,
    "group": 2,
    "head_dim": 32,
    "dtype": torch.float32,
    "kv_dtypes": (torch.float32, torch.int8),
}
interpreted = pytest.mark.skipif(
    not INTERPRETED, reason="`tests/kernels/test_kernels_interpreted.py` runs it"
)


@pytest.fixture(autouse=True)
def _one_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("disagg.bench.common.measure._WARM_UPS", 1)


@interpreted
def test_figures_have_ceilings() -> None:
    results = bench.run(AttentionBench(CPU, 1, 4, **SMALL))  # type: ignore[arg-type]
    assert [result.title for result in results] == [
        "device read",
        "decode, 2 x 20 tokens, float32",
        "decode, 2 x 20 tokens, int8",
        "prefill, 17 tokens, float32",
        "prefill, 3 tokens behind 17, float32",
        "K and V of 6 tokens written, float32",
        "prefill, 17 tokens, int8",
        "prefill, 3 tokens behind 17, int8",
        "K and V of 6 tokens written, int8",
    ]
    assert all(result.share is not None for result in results)


@interpreted
@pytest.mark.parametrize(
    ("kernel", "said"),
    [
        ("decode_attention", "decode attention is wrong"),
        ("prefill_attention", "prefill attention is wrong"),
        ("kv_write", "other bytes than its reference"),
    ],
    ids=["decode", "prefill", "write"],
)
def test_wrong_results_are_no_figure(kernel: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(bench, kernel)

    def wrong(*arguments: object) -> None:
        real(*arguments)
        target = arguments[3].k if kernel == "kv_write" else arguments[-1]  # type: ignore[attr-defined]
        target += target  # type: ignore[operator]

    options = AttentionBench(CPU, 1, 4, **{**SMALL, "kv_dtypes": (torch.float32,)})  # type: ignore[arg-type]
    monkeypatch.setattr(bench, kernel, wrong)
    with pytest.raises(InvariantError, match=said):
        bench.run(options)


def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "kernels", "--what", "attention", "--device", "cpu"]) == 2
    assert "the attention kernels need a GPU" in capsys.readouterr().err
