"""A random checkpoint whose vocabulary also has pieces of common texts, as vocabularies of real models have.

With tokens of single bytes, a random model does not find some texts that a schema may require, such as a UUID
anywhere in a string. A piece is one token, so that a random choice of tokens finds these texts too.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from disagg.model.load.tiny import VOCAB_SIZE, make_tiny_checkpoint

CONTEXT_TOKENS = 16384
PIECES = (
    "01234567-89ab-4def-8123-456789abcdef",
    "2020-01-01T00:00:00.000000",
    "2020-01-01",
    "00:00:00:00:00:00",
    "https://a.bc/",
    "http://",
    "www.",
    "a@b.cc",
    ".com",
    "0.0.0",
    "a" * 128,
    "a/b#0",
    "a-b0",
    "_DEVICE",
    "tags",
    "true",
    "subarray-10",
    "ecole",
)
"""Texts of the additional tokens. None of them continues a number, which would then not end."""
IDS_FILE = "pieces.json"
"""File of the checkpoint: the id of each piece."""


def make_checkpoint(folder: Path) -> Path:
    """Writes the tiny chat model with the additional tokens to `folder`, and returns `folder`.

    Embeddings and logits of the additional tokens are 0: only a `logit_bias` chooses between them.
    """
    make_tiny_checkpoint(folder, context_tokens=CONTEXT_TOKENS)
    ids = {piece: VOCAB_SIZE + number for number, piece in enumerate(PIECES)}
    (folder / IDS_FILE).write_text(json.dumps(ids))
    weights = load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = torch.nn.functional.pad(weights[name], (0, 0, 0, len(ids)))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "tokenizer.json"):
        content = json.loads((folder / name).read_text())
        if name == "config.json":
            content["vocab_size"] += len(ids)
        else:
            content["model"]["vocab"] |= ids
        (folder / name).write_text(json.dumps(content))
    return folder
