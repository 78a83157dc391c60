"""The tokenizer of a model source."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from disagg.core.errors import ConfigError
from disagg.model.load.checkpoint_files import read_json_object, reading
from disagg.model.load.source import ModelSource

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_VOCABULARIES = ("tokenizer.json", "vocab.*", "merges.txt", "*.model", "*.tiktoken", "tekken.json")
_MEND = "copy the model's tokenizer files to the folder again"
_SAMPLE = "A b 1."
"""Text in which any usable vocabulary has at least one token."""


def has_tokenizer(source: ModelSource) -> bool:
    """Returns whether the source has any tokenizer file, even an incomplete one. True for random weights."""
    directory = source.directory
    if directory is None:
        return True
    with reading(directory, _MEND):
        return any(_present(directory, name) for name in (*_FILES, *_VOCABULARIES))


def load_tokenizer(source: ModelSource) -> Any:
    """Returns the checkpoint's tokenizer; for random weights, a tokenizer with one token per byte.

    Raises `ConfigError` for a missing, damaged or empty tokenizer. If the vocabulary is missing, some classes of
    transformers return an empty tokenizer, which encodes any text to no tokens or to unknown tokens.
    """
    directory = source.directory
    if directory is None:
        from disagg.model.load.tiny import byte_tokenizer

        return byte_tokenizer(source.config.vocab_size)
    if not has_tokenizer(source):
        raise ConfigError(
            f"{directory} has no tokenizer, which this command needs for text: copy the model's tokenizer files "
            f"(tokenizer.json, tokenizer_config.json) to the folder, or use `disagg serve`, which takes token ids"
        )
    from transformers import AutoTokenizer

    for name in _FILES:
        if _present(directory, name):
            read_json_object(directory / name)
    whole = directory / "tokenizer.json"
    with reading(whole if whole.exists() else directory, _MEND):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        empty = len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1 or _knows_nothing(tokenizer)
    if empty:
        raise ConfigError(
            f"{directory} has no vocabulary for its {type(tokenizer).__name__}: tokenizer.json is missing; {_MEND}"
        )
    return tokenizer


def _present(directory: Path, pattern: str) -> bool:
    return (directory / pattern).is_symlink() or any(True for _ in directory.glob(pattern))


def _knows_nothing(tokenizer: Any) -> bool:
    tokens = tokenizer(_SAMPLE, add_special_tokens=False)["input_ids"]
    return all(token == tokenizer.unk_token_id for token in tokens)
