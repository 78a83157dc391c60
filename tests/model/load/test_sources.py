"""Where models come from: checkpoints, random weights, their slices, their fingerprints, their refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import HYBRIDS
from mixtures import MIXTURES
from model_helpers import make_runner
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import KVLayout, Span
from disagg.model.collective.base import SingleCollective, ThreadCollective, run_ranks
from disagg.model.load.build import build_model
from disagg.model.load.named import NAMES, named_config
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import EOS_ID, VOCAB_SIZE, byte_tokenizer, make_tiny_checkpoint

Checkpoint = Callable[[str], Path]
CPU = torch.device("cpu")


def weights_of(source: ModelSource, collective: Any = None) -> dict[str, torch.Tensor]:
    spec = source.spec(torch.float32)
    model = build_model(source, spec, collective or SingleCollective(), CPU, torch.float32).model
    return dict(model.state_dict())


@pytest.fixture
def copied(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """A copy of the llama checkpoint, to be spoiled."""
    return Path(shutil.copytree(checkpoint("llama"), tmp_path / "copy"))


def test_the_spec_of_a_checkpoint(checkpoint: Checkpoint) -> None:
    spec = ModelSource.from_directory(checkpoint("llama")).spec(torch.bfloat16)
    assert spec.architecture == "LlamaForCausalLM"
    assert spec.layout == KVLayout(layers=3, kv_heads=4, head_dim=8, dtype="bfloat16")
    assert (spec.q_heads, spec.vocab_size, spec.context_tokens) == (12, VOCAB_SIZE, 256)
    assert spec.eos_ids == (EOS_ID,)


def test_end_tokens_come_from_the_generation_config(copied: Path) -> None:
    path = copied / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))
    assert ModelSource.from_directory(copied).spec(torch.float32).eos_ids == (7, 9)


def test_the_fingerprint_follows_configuration_and_weights(copied: Path, checkpoint: Checkpoint) -> None:
    original = ModelSource.from_directory(checkpoint("llama")).fingerprint
    assert ModelSource.from_directory(copied).fingerprint == original
    weights = load_file(copied / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["lm_head.weight"] + 1}, copied / "model.safetensors")
    changed = ModelSource.from_directory(copied).fingerprint
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 0.1}))
    assert len({original, changed, ModelSource.from_directory(copied).fingerprint}) == 3


def test_random_fingerprints_follow_name_and_seed() -> None:
    found = {ModelSource.random_init(*pair).fingerprint for pair in (("tiny-llama", 0), ("tiny-llama", 1))}
    found.add(ModelSource.random_init("tiny-qwen3", 0).fingerprint)
    assert len(found) == 3
    assert ModelSource.random_init("Tiny-Llama", 0).fingerprint in found


def reassemble(parts: list[dict[str, torch.Tensor]], name: str, whole: torch.Tensor) -> torch.Tensor:
    """The whole parameter from its ranks' parts; overlapping KV heads must agree."""
    tensors = [part[name] for part in parts]
    if all(tensor.shape == whole.shape for tensor in tensors):
        return tensors[-1]
    dim = 1 if tensors[0].shape[0] == whole.shape[0] else 0
    joined, size = torch.full_like(whole, float("nan")), len(parts)
    head_dim, heads = 8, whole.shape[0] // 8
    for rank, tensor in enumerate(tensors):
        if name.endswith(("k_proj.weight", "v_proj.weight")):
            span = Span(rank * heads // size * head_dim, -(-(rank + 1) * heads // size) * head_dim)
        else:
            span = Span(rank * whole.shape[dim] // size, (rank + 1) * whole.shape[dim] // size)
        joined.narrow(dim, span.start, len(span)).copy_(tensor)
    return joined


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-mistral"])
def test_random_slices_are_parts_of_the_same_whole(name: str, size: int) -> None:
    source = ModelSource.random_init(name, seed=4)
    whole = weights_of(source)
    parts = [weights_of(source, member) for member in ThreadCollective.group(size)]
    for parameter, tensor in whole.items():
        assert torch.equal(reassemble(parts, parameter, tensor), tensor), parameter
    q = whole["model.layers.0.self_attn.q_proj.weight"]
    assert not torch.equal(q, whole["model.layers.1.self_attn.q_proj.weight"])
    assert 0.15 < q.std().item() < 0.25


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-llama:int8-channel", "tiny-qwen3-moe"])
def test_random_slices_do_not_keep_the_memory_of_the_whole(name: str) -> None:
    loaded = weights_of(ModelSource.random_init(name), ThreadCollective.group(2)[1])
    assert all(one.untyped_storage().nbytes() == one.nbytes for one in loaded.values())


@pytest.mark.parametrize("size", [1, 3])
def test_checkpoint_slices_are_parts_of_the_files(size: int, checkpoint: Checkpoint) -> None:
    stored = load_file(checkpoint("llama") / "model.safetensors")
    source = ModelSource.from_directory(checkpoint("llama"))
    parts = [weights_of(source, member) for member in ThreadCollective.group(size)]
    for name, tensor in stored.items():
        assert torch.equal(reassemble(parts, name, tensor), tensor), name


@pytest.mark.parametrize("kind", ["bin", "old names", "sharded"])
def test_checkpoints_of_other_shapes_load_alike(kind: str, copied: Path, checkpoint: Checkpoint) -> None:
    stored = load_file(copied / "model.safetensors")
    (copied / "model.safetensors").unlink()
    if kind == "bin":
        torch.save(stored, copied / "pytorch_model.bin")
    elif kind == "old names":  # saved from the base model: without the prefix, which transformers puts back
        save_file(
            {name.removeprefix("model."): tensor for name, tensor in stored.items()},
            copied / "model.safetensors",
            metadata={"format": "pt"},
        )
    else:
        names = sorted(stored)
        save_file({n: stored[n] for n in names[:9]}, copied / "model-1.safetensors")
        save_file({n: stored[n] for n in names[9:]}, copied / "model-2.safetensors")
    loaded = weights_of(ModelSource.from_directory(copied), ThreadCollective.group(2)[1])
    expected = weights_of(ModelSource.from_directory(checkpoint("llama")), ThreadCollective.group(2)[1])
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


def test_tied_embeddings_stay_tied(tmp_path: Path, copied: Path) -> None:
    config = json.loads((copied / "config.json").read_text())
    (copied / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    loaded = weights_of(ModelSource.from_directory(copied))
    assert torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


def test_named_architectures_have_the_published_sizes() -> None:
    """Billions of parameters, counted on the meta device."""
    expected = {"llama-3.1-8b": 8.03, "llama-3.2-1b": 1.24, "qwen3-8b": 8.19, "qwen3-0.6b": 0.60}
    expected |= {"mistral-7b": 7.24, "granite-4.0-h-micro": 3.19, "nemotron-h-8b": 8.10}
    assert expected.keys() <= set(NAMES)
    for name, billions in expected.items():
        from transformers import AutoModelForCausalLM

        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(named_config(name))
        assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.006), name
    with pytest.raises(ConfigError, match=r"unknown architecture 'gpt-5'; choose one of llama-3\.1-8b"):
        ModelSource.random_init("gpt-5")


def test_higher_tokens_are_spelled_by_their_numbers() -> None:
    tokenizer = byte_tokenizer(1000)
    assert len(tokenizer) == 1000
    assert tokenizer.convert_ids_to_tokens(EOS_ID) == byte_tokenizer().convert_ids_to_tokens(EOS_ID)
    assert tokenizer.decode([72, 300, EOS_ID, 999, 33], skip_special_tokens=True) == "H 300 999!"
    assert tokenizer("H 300")["input_ids"] == [72, 32, 51, 48, 48], "no text becomes one"


def test_the_byte_tokenizer_round_trips_any_text(checkpoint: Checkpoint) -> None:
    loaded = AutoTokenizer.from_pretrained(checkpoint("llama"))
    text = "".join(map(chr, range(300))) + "  two  spaces\r\n\t🎈 ☃ 中文 \u0301\U0010ffff , .don't"
    for tokenizer in (loaded, byte_tokenizer()):
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode([72, EOS_ID], skip_special_tokens=True) == "H"
        assert (tokenizer.eos_token_id, len(tokenizer)) == (EOS_ID, VOCAB_SIZE)


def test_tiny_checkpoints_are_the_same_for_the_same_seed_only(tmp_path: Path) -> None:
    made = [make_tiny_checkpoint(tmp_path / str(i), layers=1, seed=s) for i, s in enumerate((1, 1, 2))]
    prints = [ModelSource.from_directory(path).fingerprint for path in made]
    assert prints[0] == prints[1] != prints[2]
    with pytest.raises(ConfigError, match="choose one of llama"):
        make_tiny_checkpoint(tmp_path, "bert")
    with pytest.raises(ConfigError, match="no sliding window"):
        make_tiny_checkpoint(tmp_path, "llama", sliding_window=8)


def spoil(directory: Path, how: str) -> None:
    config = json.loads((directory / "config.json").read_text())
    if how == "no config":
        (directory / "config.json").unlink()
    elif how == "unknown":
        (directory / "config.json").write_text(json.dumps({**config, "model_type": "nonesuch"}))
    elif how == "broken":
        (directory / "config.json").write_text("{")
    elif how == "no weights":
        (directory / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("no config", ConfigError, "no config.json"),
        ("unknown", UnsupportedModelError, "nonesuch"),
        ("broken", ConfigError, "config.json cannot be used"),
        ("no weights", ConfigError, "no weights"),
    ],
)
def test_a_broken_directory_is_one_clear_line(how: str, error: type, match: str, copied: Path) -> None:
    spoil(copied, how)
    with pytest.raises(error, match=match) as caught:
        ModelSource.from_directory(copied)
    assert "\n" not in str(caught.value)


def test_a_missing_directory_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such model directory"):
        ModelSource.from_directory(tmp_path / "nowhere")


def test_a_weight_that_is_missing_or_misshapen_is_named(copied: Path) -> None:
    stored = load_file(copied / "model.safetensors")
    wrong = {**stored, "model.norm.weight": torch.ones(5)}
    save_file(wrong, copied / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"model\.norm\.weight is \(5,\)"):
        make_runner(copied)


def test_ranks_build_at_the_same_time(checkpoint: Checkpoint) -> None:
    """transformers changes the default dtype while it builds; another rank must not see it."""

    def work(collective: ThreadCollective) -> torch.dtype:
        runner = make_runner(checkpoint("llama"), collective, dtype=torch.bfloat16)
        return runner.pool.dtype

    assert run_ranks(4, work) == [torch.bfloat16] * 4
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("name", ["gpt-oss", "zamba2"])
def test_vectors_of_random_weights_follow_the_seed(name: str) -> None:
    """Attention sinks of each head, time steps of recurrent layers: transformers draws them without a seed."""
    config = {**MIXTURES, **HYBRIDS}[name]()
    source = dataclasses.replace(ModelSource.random_init("tiny-llama", 1), config=config)
    whole, again = weights_of(source), weights_of(source)
    other = weights_of(dataclasses.replace(source, seed=2))
    assert all(torch.equal(whole[key], again[key]) for key in whole)
    drawn = [key for key, one in whole.items() if one.dim() == 1 and not torch.equal(one, other[key])]
    assert drawn
    halves = run_ranks(2, lambda collective: weights_of(source, collective))
    for key in drawn:
        parts = [half[key] for half in halves]
        divided = len(parts[0]) < len(whole[key])
        assert torch.equal(torch.cat(parts) if divided else parts[1], whole[key])
