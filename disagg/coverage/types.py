"""The model types that transformers has a causal language model for."""

from __future__ import annotations

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from disagg.core.errors import ConfigError


def causal_types() -> tuple[str, ...]:
    """All of them, sorted."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def class_of(model_type: str) -> str:
    """Name of the class that transformers builds for a type of `causal_types`."""
    return str(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])


def chosen_types(names: str) -> tuple[str, ...]:
    """Types of a comma-separated list, in its order; all of them when it is empty.

    Raises ConfigError for a name that is no causal model type.
    """
    known = causal_types()
    chosen = tuple(name.strip() for name in names.split(",") if name.strip())
    for name in chosen:
        if name not in known:
            raise ConfigError(f"--types {name}: transformers has no causal model of this type")
    return chosen or known
