"""A tiny checkpoint, broken in one way each: what a user may hand to any command."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"
TORCH_WEIGHTS = "pytorch_model.bin"
INDEX = "model.safetensors.index.json"
FIRST, SECOND = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

Break = Callable[[Path], Any]


def write(name: str, data: bytes) -> Break:
    """The file has other contents."""
    return lambda folder: (folder / name).write_bytes(data)


def cut(name: str, size_bytes: int) -> Break:
    """The file ends early."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size_bytes])


def more(name: str) -> Break:
    """Bytes behind the file's end."""
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes() + b"more")


def link(name: str) -> Break:
    """The file is a link whose target is gone: what a mode of 000 is to others than root."""

    def do(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).symlink_to("/nowhere/at/all")

    return do


def folder_instead(name: str) -> Break:
    """A folder has the file's name."""

    def do(folder: Path) -> None:
        (folder / name).unlink()
        (folder / name).mkdir()

    return do


def pipe_instead(name: str) -> Break:
    """A pipe has the file's name: to open it would block for ever."""

    def do(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return do


def remove(*names: str) -> Break:
    """The files are not there."""
    return lambda folder: [(folder / name).unlink() for name in names]


def setting(name: str, value: object) -> Break:
    """One value of config.json is another."""

    def do(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {name: value}))

    return do


def split(folder: Path) -> None:
    """Two shards and their index."""
    tensors = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    places = {name: (FIRST, SECOND)[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in (FIRST, SECOND):
        save_file({name: tensors[name] for name, place in places.items() if place == file}, folder / file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def torch_file(folder: Path) -> None:
    """Torch's own format instead of safetensors."""
    torch.save(load_file(folder / WEIGHTS), folder / TORCH_WEIGHTS)
    (folder / WEIGHTS).unlink()


def torch_index(folder: Path) -> None:
    """The index names a second shard that is not there."""
    names = torch.load(folder / TORCH_WEIGHTS, weights_only=True)
    places = dict.fromkeys(names, "pytorch_model-00002-of-00002.bin")
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))


def other_names(file: str) -> Break:
    """A whole shard lacks one of the weights that the index names."""

    def do(folder: Path) -> None:
        tensors = load_file(folder / file)
        tensors.pop(min(tensors))
        save_file(tensors, folder / file)

    return do


def then(*breaks: Break) -> Break:
    """One after the other."""
    return lambda folder: [one(folder) for one in breaks]


def other_tokenizer(class_name: str) -> Break:
    """A tokenizer class that transformers makes without a vocabulary, and no vocabulary."""
    config = json.dumps({"tokenizer_class": class_name}).encode()
    return then(remove("tokenizer.json"), write("tokenizer_config.json", config))


def without_weight(name: str) -> Break:
    """The file is whole, and lacks one weight."""

    def do(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        del tensors[name]
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})

    return do


AT_SOURCE: dict[str, tuple[Break, str]] = {
    "empty weights": (write(WEIGHTS, b""), WEIGHTS),
    "weights cut in the header": (cut(WEIGHTS, 100), WEIGHTS),
    "weights cut in the data": (cut(WEIGHTS, 100_000), "100000 bytes instead of"),
    "a header that is no JSON": (write(WEIGHTS, struct.pack("<Q", 20) + b"x" * 2000), WEIGHTS),
    "a header of other JSON": (write(WEIGHTS, struct.pack("<Q", 10) + b'{"a": [1]}'), WEIGHTS),
    "a header without offsets": (write(WEIGHTS, struct.pack("<Q", 9) + b'{"a": {}}'), WEIGHTS),
    "a huge header": (write(WEIGHTS, b"\xff" * 2000), WEIGHTS),
    "weights behind the end": (more(WEIGHTS), WEIGHTS),
    "weights are a broken link": (link(WEIGHTS), "is a broken link"),
    "weights are a folder": (folder_instead(WEIGHTS), "is not a file"),
    "weights are a pipe": (pipe_instead(WEIGHTS), "is not a file"),
    "no weights": (remove(WEIGHTS), "has no weights"),
    "a missing shard": (then(split, remove(SECOND)), f"names the missing file {SECOND} (1 missing)"),
    "a shard that is a broken link": (then(split, link(FIRST)), f"names the missing file {FIRST}"),
    "a cut index": (then(split, write(INDEX, b'{"weight_map": {')), INDEX),
    "an index of another kind": (then(split, write(INDEX, b"[]")), INDEX),
    "an index without a map": (then(split, write(INDEX, b"{}")), "no weight_map"),
    "an index that is a broken link": (then(split, link(INDEX)), INDEX),
    "a page of a proxy": (write(WEIGHTS, b"<html>Not found</html>" * 100), f"{WEIGHTS} has no complete"),
    "an empty torch file": (
        then(torch_file, write(TORCH_WEIGHTS, b"")),
        f"{TORCH_WEIGHTS} is no weight file of torch: the file is empty",
    ),
    "a cut torch file": (then(torch_file, cut(TORCH_WEIGHTS, 100_000)), "the file is truncated"),
    "another torch file": (then(torch_file, write(TORCH_WEIGHTS, b"x" * 999)), "the file has another format"),
    "a missing torch shard": (
        then(torch_file, torch_index),
        "pytorch_model.bin.index.json names the missing file pytorch_model-00002-of-00002.bin",
    ),
    "cut config": (cut("config.json", 60), "config.json"),
    "empty config": (write("config.json", b""), "config.json"),
    "config of bytes": (write("config.json", b"\xff\xfe\x00"), "config.json"),
    "config is a list": (write("config.json", b"[]"), "config.json"),
    "config is null": (write("config.json", b"null"), "config.json"),
    "config says nothing": (write("config.json", b"{}"), "model_type"),
    "config is a folder": (folder_instead("config.json"), "has no config.json"),
    "config is a broken link": (link("config.json"), "has no config.json"),
    "a word for a number": (setting("num_hidden_layers", "four"), "num_hidden_layers"),
    "null for a number": (setting("num_hidden_layers", None), "num_hidden_layers"),
    "no heads": (setting("num_attention_heads", 0), "config.json"),
    "a negative width": (setting("hidden_size", -1), "config.json"),
    "an unknown dtype": (setting("dtype", "float99"), "float99"),
}
"""Found before anything starts, by `ModelSource.from_directory`; with a part of the one line."""

AT_SPEC: dict[str, tuple[Break, str]] = {
    "cut generation config": (cut("generation_config.json", 10), "generation_config.json"),
    "generation config is a list": (write("generation_config.json", b"[]"), "generation_config.json"),
    "a word as end token": (write("generation_config.json", b'{"eos_token_id": "x"}'), "eos_token_id is 'x'"),
}
"""Found by `ModelSource.spec`."""

AT_TOKENIZER: dict[str, tuple[Break, str]] = {
    "cut tokenizer": (cut("tokenizer.json", 500), "tokenizer.json"),
    "empty tokenizer": (write("tokenizer.json", b""), "tokenizer.json"),
    "tokenizer of another kind": (write("tokenizer.json", b'{"a": 1}'), "tokenizer.json"),
    "tokenizer is a list": (write("tokenizer.json", b"[]"), "tokenizer.json"),
    "tokenizer is a broken link": (link("tokenizer.json"), "tokenizer.json is a broken link"),
    "tokenizer is a folder": (folder_instead("tokenizer.json"), "tokenizer.json is not a file"),
    "no tokenizer.json": (remove("tokenizer.json"), "tokenizer"),
    "no tokenizer files": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "cut tokenizer config": (cut("tokenizer_config.json", 20), "tokenizer_config.json"),
    "tokenizer config is a list": (write("tokenizer_config.json", b"[]"), "tokenizer_config.json"),
    "an empty Llama tokenizer": (other_tokenizer("LlamaTokenizer"), "no vocabulary"),
    "an empty GPT-2 tokenizer": (other_tokenizer("GPT2Tokenizer"), "no vocabulary"),
    "an empty T5 tokenizer": (other_tokenizer("T5Tokenizer"), "no vocabulary"),
}
"""Found by `load_tokenizer`, before anything starts."""

AT_BUILD: dict[str, tuple[Break, str]] = {
    "another shape": (setting("vocab_size", 1000), "its config.json requires (1000, 192)"),
    "a missing weight": (
        without_weight("model.layers.1.mlp.up_proj.weight"),
        "no weight named model.layers.1.mlp.up_proj.weight",
    ),
    "a shard without a weight": (then(split, other_names(SECOND)), "has no weight named "),
    "a head without a width": (setting("head_dim", 0), "transformers cannot build it"),
    "a negative vocabulary": (setting("vocab_size", -1), "transformers cannot build it"),
    "a broken torch file": (
        then(remove(WEIGHTS), write(TORCH_WEIGHTS, b"\x80\x02junk")),
        "cannot be used",
    ),
}
"""Found by `build_model`, in a rank's process."""
