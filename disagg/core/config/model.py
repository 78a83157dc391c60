"""The section `model` of the configuration tree."""

from __future__ import annotations

from typing import Literal

from disagg.core.config.section import Section

DTypeName = Literal["auto", "float32", "bfloat16", "float16"]
AttentionName = Literal["auto", "torch", "triton"]
RecurrentName = Literal["auto", "torch", "triton"]
KVDTypeName = Literal["auto", "int8", "float8_e4m3fn", "float8_e5m2"]


class ModelConfig(Section, frozen=True):
    """The model, given by `path` or by `random_init`, not by both."""

    path: str | None = None
    """Folder of a Hugging Face checkpoint, or the name of a model on the Hugging Face hub, ORGANIZATION/MODEL. A
    folder on this machine has precedence."""
    revision: str | None = None
    """Branch, tag or commit of a model on the hub. None: the branch `main`; `disagg serve` and `disagg launch` use
    its commit at their start."""
    random_init: str | None = None
    """Name of an architecture with random weights, for demos and tests without a checkpoint. A colon and a format
    quantize the weights: `llama-3.1-8b:fp8-block`."""
    dtype: DTypeName = "auto"
    """Type of weights and activations. auto: the checkpoint's type on a GPU, float32 on a CPU."""
    seed: int = 0
    """Seed of the random weights; prefill and decode groups must use the same seed."""
    attention: AttentionName = "auto"
    """Attention backend. auto: Triton kernels on a GPU for supported models, else torch."""
    kv_dtype: KVDTypeName = "auto"
    """Type of stored and transferred KV. auto: the model's type. The 8-bit types have a scale per head and token:
    half of the memory and the traffic, with slightly different answers."""
    fused: bool = True
    """Whether norms, rotary embeddings and gated MLPs use Triton kernels on a GPU. This applies to the layer classes
    in the registries of fused layers."""
    recurrent_kernels: RecurrentName = "auto"
    """Implementation of convolutions, state spaces and delta rules. auto: Triton kernels on a GPU, else torch.
    Applies only to models whose recurrent modules are registered."""
    deterministic: bool = False
    """Whether a request's logits are bitwise independent of the batch and the group: fixed tile and split sizes, and
    a fixed order of sums. Costs a few per cent of speed. Linked groups must have the same value."""

    def __post_init__(self) -> None:
        self._one_of("dtype", DTypeName)
        self._one_of("attention", AttentionName)
        self._one_of("kv_dtype", KVDTypeName)
        self._one_of("recurrent_kernels", RecurrentName)
        self._at_least(0, "seed")
        self._needs(
            not (self.path and self.random_init),
            "random_init",
            "left out when model.path is given (one model)",
        )
        self._needs(not self.revision or bool(self.path), "revision", "left out without model.path")
