"""The model types of transformers with a causal language model."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from disagg.core.errors import ConfigError


def causal_types() -> tuple[str, ...]:
    """Returns all model types for which transformers has a causal language model, sorted."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def class_of(model_type: str) -> str:
    """Returns the name of the transformers class for a model type of `causal_types`."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def chosen_types(names: str) -> tuple[str, ...]:
    """Returns the types of a comma-separated list, in its order; all types for an empty list.

    Raises ConfigError for an unknown type.
    """
    known = causal_types()
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--types {name}: transformers has no causal model of this type")
    return chosen or known
