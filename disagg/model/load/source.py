"""The source of a model: a checkpoint directory, or a named architecture with random weights."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from disagg.core.config.read import Config
from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import dtype_name
from disagg.model.load.checkpoint_files import (
    AGAIN,
    read_json_object,
    reading,
    require_config,
    weight_files,
)
from disagg.model.load.composite import auto_class, text_name, text_part
from disagg.model.load.fingerprint import weights_digest
from disagg.model.load.hub import checkpoint_folder, folder_label
from disagg.model.load.named import named_config
from disagg.model.load.random_quantized import RandomQuantizedWeights
from disagg.model.load.weights import RandomWeights, SafetensorsWeights, StateDictWeights, WeightSource
from disagg.model.spec.model_spec import (
    ModelSpec,
    architecture_of,
    eos_ids,
    require_supported,
    spec_from_config,
)
from disagg.model.spec.quantization import Quantization, ScalesName, quantization_of

if TYPE_CHECKING:
    from disagg.model.load.quantized_names import QuantizedNames

log = structlog.get_logger(__name__)

_VOLATILE = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")  # may differ for the same model


@dataclass(frozen=True)
class ModelSource:
    """A model's configuration and the source of its weights. Weights are not read before a runner loads them."""

    name: str
    """Path of the checkpoint directory, or name of the architecture."""
    config: Any
    """The transformers configuration. Callers must not change it."""
    identity: str
    """Hex digest over the configuration and, for random weights, their name and seed."""
    directory: Path | None
    """Directory of the checkpoint and its tokenizer; None for random weights."""
    seed: int
    """Seed of random weights; 0 for a checkpoint."""

    @classmethod
    def from_directory(cls, path: str | Path) -> ModelSource:
        """Returns the source of a Hugging Face checkpoint. Raises a one-line ConfigError or UnsupportedModelError."""
        directory = Path(path)
        require_config(directory)
        config = _read_config(directory)
        require_supported(config)
        weight_files(directory)  # raises if weights are missing
        source = cls(str(directory), config, _config_digest(config).hexdigest(), directory, 0)
        if source.quantization is not None:
            source.stored_weights()  # raises for files of another kind
        return source

    @classmethod
    def random_init(cls, name: str, seed: int = 0, *, std: float | None = None) -> ModelSource:
        """Returns the source of random weights for an architecture of `disagg.model.load.named`.

        The weights are normally distributed with standard deviation `std`, by default the architecture's
        `initializer_range`. Raises ConfigError for an unknown name.
        """
        config = named_config(name)
        if std is not None:
            config.initializer_range = std
        digest = _config_digest(config)
        digest.update(f"random {name.lower()} {seed}".encode())
        return cls(name, config, digest.hexdigest(), None, seed)

    @property
    def label(self) -> str:
        """Name for reports and the API: of the folder, of the model on the hub, or of the architecture."""
        return self.name if self.directory is None else folder_label(self.directory)

    @cached_property
    def fingerprint(self) -> str:
        """Returns a hex digest over the configuration and all bytes of the weights, equal on every machine.

        The first call reads the weight files, or takes their hashes from the user's cache folder; see
        `disagg.model.load.fingerprint`.
        """
        if self.directory is None:
            return self.identity
        with reading(self.directory):
            weights = weights_digest(weight_files(self.directory), os.environ)
        return hashlib.blake2b(f"{self.identity} {weights}".encode(), digest_size=16).hexdigest()

    @cached_property
    def quantization(self) -> Quantization | None:
        """Returns the format of quantized weights; None if no weights are quantized.

        Scales of 4-bit values, which are many, keep a 16-bit type of the checkpoint.
        """
        form = quantization_of(self.config)
        if form is None or form.elements != "int4":
            return form
        found = {"BF16"}
        if self.directory is not None:
            from disagg.model.load.quantized_tensors import PACKINGS  # imports Triton

            found = _quantized_weights(self.directory).dtypes(PACKINGS[form.storage].scale_names)
        kinds: dict[str, ScalesName] = {"BF16": "bfloat16", "F16": "float16"}
        scales = kinds.get(found.pop(), "float32") if len(found) == 1 else "float32"
        return replace(form, scales=scales)

    def quantized_names(self, model: Any) -> QuantizedNames:
        """Returns the quantized parts of `model`, which is on the meta device and not split yet.

        Raises UnsupportedModelError if a layer that cannot be replaced is quantized.
        """
        # Imports torch._dynamo and torch.distributed.tensor, which a router need not load.
        from disagg.model.load.quantized_names import (
            QuantizedNames,
            names_in_model,
            random_names,
            stored_layers,
        )

        form = self.quantization
        if form is None:
            return QuantizedNames()
        if self.directory is None:
            return random_names(form, model)
        stored = stored_layers(_quantized_weights(self.directory).names(), form)
        return names_in_model(stored, form, model, architecture_of(self.config))

    def stored_weights(self) -> WeightSource:
        """Opens the weights of a quantized model under their names in the checkpoint.

        Raises UnsupportedModelError for files of torch's format.
        """
        form = self.quantization
        assert form is not None
        if self.directory is None:
            return RandomQuantizedWeights(self.seed, self.config.initializer_range, form.elements)
        return _quantized_weights(self.directory)

    def spec(self, kv_dtype: torch.dtype) -> ModelSpec:
        """Returns the model's spec with a KV cache of `kv_dtype`."""
        spec = spec_from_config(self.config, dtype_name(kv_dtype))
        ids = self._generation_eos_ids
        return spec if ids is None else _with_eos(spec, ids)

    @cached_property
    def _generation_eos_ids(self) -> tuple[int, ...] | None:
        return _generation_eos_ids(self.directory)

    def weights(self, needed: set[str], model: Any = None) -> WeightSource:
        """Opens the weights; `needed` are the parameter names of `model`.

        From safetensors files with these parameter names, or with a weight for each expert, only the needed slices
        are read. Checkpoints in another format, or with other names, are read by transformers' own loader. The loader
        reads the whole model into host memory.
        """
        if self.directory is None:
            if self.quantization is not None:
                return self.stored_weights()
            return RandomWeights(self.seed, self.config.initializer_range)
        files = weight_files(self.directory)
        if all(file.suffix == ".safetensors" for file in files):
            stored = SafetensorsWeights(files)
            text = stored.renamed(text_name)
            for one in (stored, text):
                if needed <= one.names():
                    return one
            if model is not None:
                # Imports torch.distributed.tensor.
                from disagg.model.load.merged_weights import merged_weights

                if (merged := merged_weights(stored, needed, model)) is not None:
                    return merged
            if self.quantization is not None:
                missing = min(needed - text.names())
                raise ConfigError(
                    f"the quantized checkpoint {self.directory} has no weight named {missing}; {AGAIN}"
                )
            log.info(
                "checkpoint_read_whole", directory=str(self.directory), why="its weights have other names"
            )
        whole = load_pretrained(self.directory, "auto")
        return StateDictWeights({text_name(name): tensor for name, tensor in whole.state_dict().items()})


def _quantized_weights(directory: Path) -> SafetensorsWeights:
    """Opens the weights of a quantized checkpoint. Raises UnsupportedModelError for files of torch's format."""
    files = weight_files(directory)
    if any(file.suffix != ".safetensors" for file in files):
        raise UnsupportedModelError(
            f"quantized weights are read from *.safetensors only, not from {files[0]}"
        )
    return SafetensorsWeights(files)


def load_pretrained(directory: Path, dtype: torch.dtype | str) -> Any:
    """Loads the whole model by transformers' own loader. Raises ConfigError when that fails or a weight is missing.

    transformers itself would replace a missing weight by random numbers, with only a warning.
    """
    with reading(directory):
        model, info = auto_class(
            AutoConfig.from_pretrained(directory, local_files_only=True)
        ).from_pretrained(directory, dtype=dtype, local_files_only=True, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{directory} has no weight named {missing[0]} ({len(missing)} missing); {AGAIN}")
    return model


def _read_config(directory: Path) -> Any:
    path = directory / "config.json"
    with reading(
        path,
        "repair the file, or use a model that the installed transformers supports",
        UnsupportedModelError,
    ):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
        text = text_part(config)
        if type(text) in AutoModelForCausalLM._model_mapping:
            return text
    raise UnsupportedModelError(f"{config.model_type} in {directory} is not a decoder-only language model")


def _generation_eos_ids(directory: Path | None) -> tuple[int, ...] | None:
    """Returns the end tokens in generation_config.json, where chat models list more end tokens than in config.json.

    Returns None if the file is missing or lists none.
    """
    if directory is None or not (directory / "generation_config.json").is_file():
        return None
    path = directory / "generation_config.json"
    read_json_object(path)
    with reading(path):
        found = GenerationConfig.from_pretrained(directory, local_files_only=True).eos_token_id
        ids = None if found is None else eos_ids(found)
    if ids is not None and not all(isinstance(one, int) for one in ids):
        raise ConfigError(f"{path}: eos_token_id is {found!r}; it must be a number or a list of numbers")
    return ids


def _with_eos(spec: ModelSpec, ids: tuple[int, ...]) -> ModelSpec:
    return msgspec.structs.replace(spec, eos_ids=ids)


def _config_digest(config: Any) -> Any:
    values = {key: value for key, value in config.to_dict().items() if key not in _VOLATILE}
    return hashlib.blake2b(json.dumps(values, sort_keys=True, default=str).encode(), digest_size=16)


def make_source(config: Config) -> ModelSource:
    """Returns the source of the model that `config.model` names. Raises `ConfigError` if no model is named."""
    model = config.model
    if model.path:
        return ModelSource.from_directory(checkpoint_folder(model.path, model.revision))
    if model.random_init:
        return ModelSource.random_init(model.random_init, model.seed)
    raise ConfigError("no model: give --model DIR or --random-init NAME")
