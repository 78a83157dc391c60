"""The tokenizer of a model source."""

from __future__ import annotations

from typing import Any

from disagg.core.errors import ConfigError
from disagg.model.load.checkpoint_files import read_json_object, reading
from disagg.model.load.source import ModelSource

_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")
_MEND = "copy the model's tokenizer files to the folder again"


def load_tokenizer(source: ModelSource) -> Any:
    """Returns the checkpoint's tokenizer; for random weights, a tokenizer with one token per byte.

    Raises `ConfigError` for a missing, damaged or empty tokenizer. Some classes of transformers return an empty
    tokenizer if the vocabulary is missing.
    """
    directory = source.directory
    if directory is None:
        from disagg.model.load.tiny import byte_tokenizer

        return byte_tokenizer(source.config.vocab_size)
    from transformers import AutoTokenizer

    for name in _FILES:
        if (directory / name).exists() or (directory / name).is_symlink():
            read_json_object(directory / name)
    whole = directory / "tokenizer.json"
    with reading(whole if whole.exists() else directory, _MEND):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        only_special = len(tokenizer) <= len(tokenizer.added_tokens_decoder) + 1
    if only_special:
        raise ConfigError(
            f"{directory} has no vocabulary for its {type(tokenizer).__name__}: tokenizer.json is missing; {_MEND}"
        )
    return tokenizer
