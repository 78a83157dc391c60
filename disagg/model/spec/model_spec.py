"""What the rest of the system must know about a model, read from its configuration alone."""

from __future__ import annotations

from typing import Any

import msgspec

from disagg.core.errors import PromptTooLongError, UnsupportedModelError
from disagg.core.types import QUANTIZED_DTYPES, KVLayout, LayerClass, Shard, Span
from disagg.model.spec.layer_types import attention_layers, recurrent_layers, setting, unknown_types
from disagg.model.spec.shapes import HeadShape, LayerPlace, plan_cache, unknown_indexers

# A model without attention has no KV, but its state moves in a KV pool. Heads of this size hold it in few tokens.
_STATE_HEADS = 8
_STATE_HEAD_DIM = 1024
_NO_LIMIT_TOKENS = (
    1 << 20
)  # the context of a model that names none because nothing of it grows with a request
_BLOOM_TOKENS = 2048  # what BLOOM was trained with


class ModelSpec(msgspec.Struct, frozen=True):
    """A model as the scheduler and the planner see it. Can cross the wire."""

    architecture: str
    """Class name of the model, such as `LlamaForCausalLM`."""
    fingerprint: str
    """Hash over configuration and weights: equal on two groups that serve the same model."""
    layout: KVLayout
    q_heads: int
    """Of the first class of layers, see `KVLayout`, as are `k_dim` and `v_dim`."""
    k_dim: int
    """Elements of a head of K; `layout.head_dim` is the larger of it and `v_dim`. 0 without attention."""
    v_dim: int
    vocab_size: int
    context_tokens: int
    """Longest prompt plus answer that the model was made for."""
    eos_ids: tuple[int, ...]
    """Tokens that end an answer."""
    rope_switch_tokens: int = 0
    """Requests longer than it use another rotary embedding (`longrope`); 0 when there is only one."""
    state_tokens: int = 0
    """Tokens of KV that are as large as a request's recurrent state; 0 without one. Known to a runner only."""
    whole_prompts: bool = False
    """A prompt must be computed in one step. Known to a runner only."""
    more: tuple[HeadShape, ...] = ()
    """The heads of the other classes of layers."""
    places: tuple[LayerPlace, ...] = ()
    """Where the KV cache has each attention layer; empty where it has them all, in their order."""

    @property
    def cache_refused(self) -> str:
        """Why no prompt may begin with the KV of another one's beginning; empty if it may. Of a runner's spec.

        A recurrent state is known behind a whole prompt only. Which of equally scored tokens a sparse layer reads
        depends on the length of the prompt, in transformers.
        """
        if self.state_tokens or self.whole_prompts:
            return "its recurrent state is not kept by tokens"
        if not all(one.has_v for one in self.layout.classes):
            return "which tokens its sparse layers read depends on the prompt's length"
        return ""

    @property
    def has_attention(self) -> bool:
        """False for a model of recurrent layers alone: its pool holds nothing but states on their way."""
        return self.k_dim > 0

    @property
    def attention_layers(self) -> int:
        """Layers that attend; some of them may read the K and V of others."""
        return len(self.places) or (self.layout.layers if self.has_attention else 0)

    @property
    def shapes(self) -> tuple[HeadShape, ...]:
        """The heads of each class of layers."""
        return (HeadShape(self.q_heads, self.layout.kv_heads, self.k_dim, self.v_dim), *self.more)

    def class_of(self, layer: int) -> int:
        """Number of the class of an attention layer, which is given by its number among them."""
        if not self.more:
            return 0
        place = self.places[layer].layer
        return next(number for number, span in enumerate(self.layout.spans) if place in span)


def kv_span(rank: int, size: int, kv_heads: int) -> Span:
    """KV heads of rank `rank` of `size`: all that the rank's query heads touch.

    Neighbours overlap when `kv_heads` is no multiple of `size`; with more ranks than heads, heads repeat.
    """
    return Span(rank * kv_heads // size, -(-(rank + 1) * kv_heads // size))


def shard_of(layout: KVLayout, rank: int, size: int) -> Shard:
    """What rank `rank` of a tensor-parallel group of `size` ranks owns: all layers, its KV heads."""
    return Shard.of_classes(rank, layout, lambda heads: kv_span(rank, size, heads))


def rank_token_bytes(layout: KVLayout, size: int) -> int:
    """KV of one token on that rank of `size` which has most heads."""
    return max(layout.token_bytes_of(shard_of(layout, rank, size)) for rank in range(size))


def spec_from_config(config: Any, fingerprint: str, kv_dtype: str) -> ModelSpec:
    """The spec of a transformers configuration. Raises UnsupportedModelError as `require_supported` does."""
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
                f"{architecture_of(config)} has index keys beside its KV, which cannot be in 8 bits: leave "
                "model.kv_dtype and decode.kv_dtype unset"
            )
        layout = KVLayout(layers, first.kv_heads, max(first.k_dim, first.v_dim), kv_dtype, more)
    else:
        first, others, places = HeadShape(_STATE_HEADS, _STATE_HEADS, 0, 0), [], ()
        layout = KVLayout(1, _STATE_HEADS, _STATE_HEAD_DIM, kv_dtype)
    return ModelSpec(
        architecture=architecture_of(config),
        fingerprint=fingerprint,
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
    """Raises PromptTooLongError for a request that would change its rotary embedding in the middle of its answer.

    All its cached keys would have to be computed again.
    """
    switch = spec.rope_switch_tokens
    if switch and prompt_tokens <= switch < prompt_tokens + max_tokens - 1:
        raise PromptTooLongError(
            f"{prompt_tokens} prompt tokens and an answer of up to {max_tokens} pass {switch} tokens, where "
            f"{spec.architecture} changes its rotary embedding: ask for at most {switch + 1 - prompt_tokens} tokens, "
            f"or give a prompt of more than {switch}"
        )


def _context_tokens(config: Any) -> int | None:
    """None when the configuration names no context length."""
    if config.model_type == "mpt":
        return int(config.max_seq_len)
    if config.model_type == "bloom":  # has no limit of its own
        return int(getattr(config, "seq_length", _BLOOM_TOKENS))
    if config.model_type == "doge":  # a longer context leaves out keys
        return min(int(config.max_position_embeddings), int(config.keep_window_size))
    found = setting(config, "max_position_embeddings")
    return found if found and found > 0 else None  # xlnet says -1


def eos_ids(value: int | list[int] | None) -> tuple[int, ...]:
    """`eos_token_id` of a configuration, which is a number, a list or absent, as a tuple."""
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def architecture_of(config: Any) -> str:
    """The model class that a configuration names, else its model type."""
    names = getattr(config, "architectures", None)
    return str(names[0] if names else config.model_type)


def require_supported(config: Any) -> None:
    """Raises UnsupportedModelError, one line, for what the configuration alone shows to be unsupported."""
    reason = _unsupported(config)
    if reason:
        raise UnsupportedModelError(f"{architecture_of(config)} is not supported: {reason}")


def _unsupported(config: Any) -> str | None:
    if config.is_encoder_decoder:
        return "it has an encoder; only decoder-only models are served"
    if config.get_text_config() is not config:
        return "its text part is no causal model that can be served alone"
    if getattr(config, "quantization_config", None):
        return "its weights are quantized; use a bf16, fp16 or fp32 checkpoint"
    if getattr(config, "languages", None) and not getattr(config, "default_language", None):
        return "its configuration names no default_language, whose adapters would be used"
    # With "vision" text never is.
    if getattr(config, "use_bidirectional_attention", None) not in (None, False, "vision"):
        return "its attention is bidirectional"
    if getattr(config, "num_hidden_layers", None) is None:
        return "its configuration names no layers"
    if other := unknown_types(config):
        return f"it has layers of other types than attention and recurrent ones: {', '.join(other)}"
    if unknown_indexers(config):
        return "its layers choose the tokens that they read by other than one index key for each token"
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
    # `dynamic` scaling begins beyond the context that we serve, so it never changes anything here.
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]  # one entry per layer type
    switches = {
        int(entry["original_max_position_embeddings"])
        for entry in [parameters, *nested]
        if entry.get("rope_type") == "longrope"
    }
    return switches.pop() if switches else 0
