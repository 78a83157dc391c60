"""`ModelSpec`: the properties of a model that schedulers and planners use, read from its configuration alone."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.core.errors import PromptTooLongError, UnsupportedModelError
from disagg.core.types import QUANTIZED_DTYPES, KVLayout, LayerClass, Shard
from disagg.model.spec.layer_types import attention_layers, recurrent_layers, setting, unknown_types
from disagg.model.spec.quantization import UnsupportedQuantizationError, quantization_of
from disagg.model.spec.shapes import HeadShape, LayerPlace, plan_cache, unknown_indexers

_NO_KV_HEAD_DIM = 8
"""Head size of the unused KV pool of a model without attention."""
_NO_KV_QUERY_HEADS = 240
"""Number of query heads assumed for a model without attention: a number divisible by all usual TP sizes."""
_NO_LIMIT_TOKENS = 1 << 20
"""Context length of a model that specifies none and whose memory does not depend on a request's length."""
_BLOOM_TOKENS = 2048
"""Context length of BLOOM, taken from its training, because its configuration has none."""


class ModelSpec(msgspec.Struct, frozen=True):
    """Properties of a model for schedulers and planners. Can be sent in messages."""

    architecture: str
    """Class name of the model, such as `LlamaForCausalLM`."""
    layout: KVLayout
    q_heads: int
    """Number of query heads in the first layer class (see `KVLayout`). `k_dim` and `v_dim` are for this class,
    too."""
    k_dim: int
    """Elements of a K head, 0 without attention; `layout.head_dim` is the larger of `k_dim` and `v_dim`."""
    v_dim: int
    vocab_size: int
    context_tokens: int
    """Context length: largest sum of prompt and answer."""
    eos_ids: tuple[int, ...]
    """Tokens that end an answer."""
    rope_switch_tokens: int = 0
    """Length beyond which requests use another rotary embedding (`longrope`); 0 if the embedding does not change."""
    whole_prompts: bool = False
    """Whether a prompt must be computed in one step. Set only in a runner's spec."""
    any_chunks: bool = False
    """Whether recurrent layers compute a prompt exactly in chunks of any size, also of one token. Set only in a
    runner's spec."""
    answers_differ: bool = False
    """Whether a token leaves a different recurrent state in an answer than in a prompt. With
    `ModelConfig.deterministic`, a difference of one bit counts; otherwise, rounding is ignored. Set only in a
    runner's spec."""
    scores_prompts: bool = False
    """Whether steps can compute the log-probabilities of prompt tokens. Set only in a runner's spec."""
    more: tuple[HeadShape, ...] = ()
    """Heads of the layer classes after the first one."""
    places: tuple[LayerPlace, ...] = ()
    """Place of each attention layer in the KV cache; empty if the cache has all layers in order."""

    @property
    def cache_refused(self) -> str:
        """Reason why the prefix cache is disabled for the model; empty if enabled. Valid in a runner's spec only.

        Recurrent layers disable the prefix cache if they cannot continue a prompt after an arbitrary position. Sparse
        layers disable it because, in transformers, their choice among tokens with equal scores depends on the
        prompt's length.
        """
        if self.has_state and not self.any_chunks:
            return "its recurrent layers cannot continue a prompt after an arbitrary position"
        if not all(one.has_v for one in self.layout.classes):
            return "the tokens that its sparse layers choose depend on the prompt's length"
        return ""

    @property
    def has_attention(self) -> bool:
        """Whether the model has attention layers. If not, its KV pool stays unused."""
        return self.k_dim > 0

    @property
    def has_state(self) -> bool:
        """Whether requests have a recurrent state. Valid in a runner's spec only."""
        return bool(self.layout.states)

    @property
    def attention_layers(self) -> int:
        """Number of attention layers; some may read the K and V of other layers."""
        return len(self.places) or (self.layout.layers if self.has_attention else 0)

    @property
    def shapes(self) -> tuple[HeadShape, ...]:
        """Heads of each layer class."""
        return (HeadShape(self.q_heads, self.layout.kv_heads, self.k_dim, self.v_dim), *self.more)

    def class_of(self, layer: int) -> int:
        """Returns the class index of attention layer `layer`, counted among attention layers only."""
        if not self.more:
            return 0
        place = self.places[layer].layer
        return next(number for number, span in enumerate(self.layout.spans) if place in span)


def shard_of(layout: KVLayout, rank: int, size: int) -> Shard:
    """Returns the shard of rank `rank` in a tensor-parallel group of `size`: all layers, and the rank's KV heads and
    heads of recurrent states."""
    return Shard.of_classes(rank, size, layout)


def rank_token_bytes(layout: KVLayout, size: int) -> int:
    """Returns the bytes of one token's KV on the rank that stores the most, in a group of `size` ranks."""
    return max(layout.token_bytes_of(shard_of(layout, rank, size)) for rank in range(size))


def spec_from_config(config: Any, kv_dtype: str) -> ModelSpec:
    """Returns the spec of a transformers configuration. Raises UnsupportedModelError as `require_supported` does."""
    require_supported(config)
    if attention_layers(config):
        classes, places = plan_cache(config)
        (first, layers), *others = classes
        more = tuple(
            LayerClass(count, one.kv_heads, max(one.k_dim, one.v_dim), has_v=one.v_dim > 0)
            for one, count in others
        )
        if kv_dtype in QUANTIZED_DTYPES and not all(one.has_v for one in more):
            raise UnsupportedModelError(
                f"{architecture_of(config)} has index keys, which have no 8-bit format: leave "
                "model.kv_dtype and decode.kv_dtype unset"
            )
        layout = KVLayout(layers, first.kv_heads, max(first.k_dim, first.v_dim), kv_dtype, more)
    else:
        first, others, places = HeadShape(_NO_KV_QUERY_HEADS, 1, 0, 0), [], ()
        layout = KVLayout(1, 1, _NO_KV_HEAD_DIM, kv_dtype)
    return ModelSpec(
        architecture=architecture_of(config),
        layout=layout,
        q_heads=first.q_heads,
        k_dim=first.k_dim,
        v_dim=first.v_dim,
        vocab_size=config.vocab_size,
        context_tokens=_context_tokens(config) or _NO_LIMIT_TOKENS,
        eos_ids=eos_ids(getattr(config, "eos_token_id", None)),
        rope_switch_tokens=_rope_switch_tokens(config),
        more=tuple(one for one, _ in others),
        places=places,
    )


def require_one_rope(spec: ModelSpec, prompt_tokens: int, max_tokens: int) -> None:
    """Raises PromptTooLongError if a request's answer may cross the length at which the rotary embedding changes.

    At this length, all cached keys of the request would have to be recomputed.
    """
    switch = spec.rope_switch_tokens
    if switch and prompt_tokens <= switch < prompt_tokens + max_tokens - 1:
        raise PromptTooLongError(
            f"{prompt_tokens} prompt tokens and an answer of up to {max_tokens} pass {switch} tokens, where "
            f"{spec.architecture} changes its rotary embedding: set max_tokens to at most "
            f"{switch + 1 - prompt_tokens}, or send a prompt of more than {switch} tokens"
        )


def _context_tokens(config: Any) -> int | None:
    """Returns the configured context length in tokens; None if the configuration has none."""
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    if config.model_type == "bloom":  # its configuration has no limit
        return int(getattr(config, "seq_length", _BLOOM_TOKENS))
    if config.model_type == "doge":  # beyond this size the model drops keys
        return min(int(config.max_position_embeddings), int(config.keep_window_size))
    found = setting(config, "max_position_embeddings")
    return found if found and found > 0 else None  # -1 in xlnet


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """Returns `eos_token_id` of a configuration (a number, a list or None) as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def architecture_of(config: Any) -> str:
    """Returns the model class named in the configuration, else the model type."""
    names = getattr(config, "architectures", None)
    return str(names[0] if names and isinstance(names, list) else config.model_type)


def require_supported(config: Any) -> None:
    """Raises a one-line UnsupportedModelError if the configuration alone shows that the model is unsupported."""
    reason = _unsupported(config)
    if reason:
        raise UnsupportedModelError(f"{architecture_of(config)} is not supported: {reason}")


def _unsupported(config: Any) -> str | None:
    if config.is_encoder_decoder:
        return "it has an encoder; only decoder-only models are served"
    if config.get_text_config() is not config:
        return "its text part is no causal model that can be served alone"
    try:
        quantization_of(config)
    except UnsupportedQuantizationError as exc:
        return str(exc)
    if getattr(config, "languages", None) and not getattr(config, "default_language", None):
        return "its configuration names no default_language, whose adapters would be used"
    # With "vision", only image tokens attend to later tokens; text stays causal.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "its attention is bidirectional"
    if getattr(config, "num_hidden_layers", None) is None:
        return "its configuration names no layers"
    if other := unknown_types(config):
        return f"it has layers of unsupported types: {', '.join(other)}"
    if unknown_indexers(config):
        return "its sparse layers do not choose tokens by one index key per token"
    if not attention_layers(config):
        return None
    if setting(config, "num_attention_heads") is None:
        return "its configuration names no attention heads"
    if recurrent_layers(config) and plan_cache(config).places:
        return "it has recurrent layers beside attention layers that differ in their heads or share K and V"
    if _context_tokens(config) is None:
        return "its configuration names no context length (max_position_embeddings)"
    return None


def _rope_switch_tokens(config: Any) -> int:
    # `dynamic` scaling begins beyond the served context, so this scaling has no effect.
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # one entry per layer type
    switches = {
        int(entry["original_max_position_embeddings"])
        for entry in [parameters, *nested]
        if entry.get("rope_type") == "longrope"
    }
    return switches.pop() if switches else 0
