"""MLPs that ranks share by their inner elements, also those with one projection of gate and up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slow_parameters import sampled

from disagg.coverage.checkpoint import save_checkpoint
from disagg.coverage.tiny_config import tiny_config
from disagg.model.collective.base import ThreadCollective, run_ranks
from disagg.model.load.build import build_model, empty_model
from disagg.model.load.source import ModelSource
from disagg.model.split.sharder import Sharding, shard_model

INNER = {
    "phi3": ({"mlp.gate_up_proj.weight": 2}, {"mlp.down_proj.weight"}),
    "glm4": ({"mlp.gate_up_proj.weight": 2}, {"mlp.down_proj.weight"}),
    "modernbert-decoder": ({"mlp.Wi.weight": 2}, {"mlp.Wo.weight"}),
    "granitemoe_swa": ({"shared_mlp.input_linear.weight": 2}, {"shared_mlp.output_linear.weight"}),
    "apertus": ({"mlp.up_proj.weight": 1}, {"mlp.down_proj.weight"}),
    "bamba": ({"feed_forward.gate_proj.weight": 1}, {"feed_forward.down_proj.weight"}),
    "lfm2": ({"feed_forward.w1.weight": 1, "feed_forward.w3.weight": 1}, {"feed_forward.w2.weight"}),
    "opt": ({"fc1.weight": 1, "fc1.bias": 1}, {"fc2.weight"}),
    "bert": ({"intermediate.dense.weight": 1}, {"output.dense.weight"}),
    "ctrl": ({"ffn.0.weight": 1, "ffn.0.bias": 1}, {"ffn.2.weight"}),
}
"""By model type: layers that compute inner elements, with the number of sections; and layers that sum over them."""


def source_of(name: str, directory: Path) -> ModelSource:
    save_checkpoint(tiny_config(name), directory, 1)
    return ModelSource.from_directory(directory)


@pytest.mark.parametrize("name", sampled(INNER, lambda name: name in ("phi3", "opt", "lfm2")))
def test_a_rank_holds_a_slice_of_each_section(name: str, tmp_path: Path) -> None:
    source, (columns, rows) = source_of(name, tmp_path), INNER[name]
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> dict[str, torch.Tensor]:
        built = build_model(source, spec, collective, torch.device("cpu"), torch.float32)
        return {key: one.detach() for key, one in built.model.named_parameters()}

    [whole], halves = run_ranks(1, work), run_ranks(2, work)
    checked = set()
    for key, expected in whole.items():
        leaf = next((leaf for leaf in {*columns, *rows} if key.endswith(f".{leaf}")), None)
        if leaf is None or "attention" in key:
            continue
        dim, sections = (1, 1) if leaf in rows else (0, columns[leaf])
        parts = [half[key].chunk(sections, dim) for half in halves]
        joined = torch.cat([torch.cat(pieces, dim) for pieces in zip(*parts, strict=True)], dim)
        assert torch.equal(joined, expected), key
        assert halves[0][key].shape[dim] == expected.shape[dim] // 2
        checked.add(leaf)
    assert checked == {*columns, *rows}


def test_an_mlp_that_is_too_narrow_is_held_whole(tmp_path: Path) -> None:
    source = source_of("glm4", tmp_path)
    spec = source.spec(torch.float32)

    def work(collective: ThreadCollective) -> Sharding:
        model = empty_model(source, spec, torch.float32)
        model.model.layers[0].mlp.down_proj = torch.nn.Linear(1, 64, device="meta")
        return shard_model(model, spec, collective)

    for found in run_ranks(2, work):
        assert found.whole == {"model.layers.*.mlp": "2 ranks cannot share 1 inner elements"}
        assert "model.layers.1.mlp.down_proj.weight" in found.cuts
        assert "model.layers.0.mlp.gate_up_proj.weight" not in found.cuts
