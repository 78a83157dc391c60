"""The benchmark of quantized experts: both products, by the kernel and by conversion; wrong ones are no figure."""

from __future__ import annotations

import json

import pytest
import torch

from disagg.bench.kernels import quantized_experts as bench
from disagg.cli.app import run
from disagg.core.errors import InvariantError

SMALL = (bench.ExpertSizes("a model", "fp4", 3, 2, 32, 32), bench.ExpertSizes("another", "fp8", 3, 2, 32, 32))


def test_the_command_shows_each_product(capsys: pytest.CaptureFixture[str]) -> None:
    command = [
        "bench",
        "kernels",
        "--what",
        "quantized_experts",
        "--repeats",
        "1",
        "--device",
        "cpu",
        "--json",
    ]
    assert run(command) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert (
        [one["title"] for one in results]
        == [
            f"{name}, {tokens} tokens, {product} product, converted"  # float32, which the kernel does not multiply
            for name in ("Qwen3 30B A3B", "gpt-oss 20B")
            for product in ("first", "second")
            for tokens in (1, 5)
        ]
    )
    assert {one["unit"] for one in results} == {"GB/s"}


def test_the_kernel_is_measured_for_few_rows() -> None:
    found = bench.run(bench.QuantizedExpertsBench(torch.device("cpu"), 1, SMALL, (1, 1000), torch.bfloat16))
    few = [one.title for one in found if "1 tokens" in one.title]
    many = [one.title for one in found if "1000 tokens" in one.title]
    assert sum("kernel 16x64" in title for title in few) == 4
    assert len(few) == 8
    assert [title.rpartition(" ")[2] for title in many] == ["converted"] * 4


@pytest.mark.parametrize("way", ["expert_quantized", "ConvertedExperts"])
def test_wrong_quantized_products_are_no_figure(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(bench, way)

    def wrong(*arguments: object, **more: object) -> object:
        made = real(*arguments, **more)
        return (lambda *own: made(*own) + 1) if way == "ConvertedExperts" else made + 1

    monkeypatch.setattr(bench, way, wrong)
    with pytest.raises(InvariantError, match="quantized experts is wrong: a model, 3 tokens, first product"):
        bench.run(bench.QuantizedExpertsBench(torch.device("cpu"), 1, SMALL, (3,), torch.bfloat16))
