"""Writes small checkpoints with random weights: real architectures, in the usual file formats.

The tokenizer has one token per byte, so encoding and decoding preserve any UTF-8 text. Weights are larger than usual
initial weights, so that greedy answers vary, and the best token's logit exceeds the others by a clear margin.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from disagg.core.errors import ConfigError

BYTES = 256
SPECIALS = ("<|bos|>", "<|eos|>", "<|pad|>")
BOS_ID, EOS_ID, PAD_ID = BYTES, BYTES + 1, BYTES + 2
VOCAB_SIZE = BYTES + len(SPECIALS)

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<{{ message.role }}>\n{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>\n{% endif %}"
)
"""Chat template of the tokenizer: a line with the role, then the message."""

_CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig,
    "qwen3": Qwen3Config,
    "mistral": MistralConfig,
    "gemma2": Gemma2Config,
}
ARCHITECTURES = tuple(_CONFIGS)


def byte_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token per byte plus `SPECIALS`, and a chat template.

    The ids 0..255 are the bytes themselves. If `vocab_size` is larger, no text is encoded to the additional ids, and
    each of these ids is decoded to its number, such as ` 12345`.
    """
    alphabet = _byte_alphabet()
    vocabulary = {character: byte for byte, character in alphabet.items()}
    vocabulary |= {name: BYTES + number for number, name in enumerate(SPECIALS)}
    vocabulary |= {f"{alphabet[32]}{token}": token for token in range(VOCAB_SIZE, vocab_size)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    bos, eos, pad = SPECIALS
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class TinySizes:
    """Sizes of a tiny checkpoint."""

    layers: int = 4
    hidden: int = 192
    q_heads: int = 12
    kv_heads: int = 4
    head_dim: int = 16
    mlp: int = 384
    sliding_window: int | None = None
    """Sliding window in tokens; only for mistral and gemma2."""
    context_tokens: int = 2048


def make_tiny_checkpoint(
    directory: str | Path, architecture: str = "llama", *, seed: int = 0, **sizes: Any
) -> Path:
    """Writes a checkpoint to `directory` and returns `directory`.

    The files are config, safetensors weights (float32), and a tokenizer with a chat template.
    `sizes`: fields of `TinySizes`, to override its defaults. Greedy answers are printable ASCII and end by length
    only. Raises ConfigError for an unknown architecture, or for a sliding window in an architecture without windows.
    """
    if architecture not in _CONFIGS:
        raise ConfigError(f"no tiny {architecture!r}; choose one of {', '.join(ARCHITECTURES)}")
    chosen = TinySizes(**sizes)
    if chosen.sliding_window is not None and architecture not in ("mistral", "gemma2"):
        raise ConfigError(f"{architecture} has no sliding window; only mistral and gemma2 have one")
    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": chosen.hidden,
        "intermediate_size": chosen.mlp,
        "num_hidden_layers": chosen.layers,
        "num_attention_heads": chosen.q_heads,
        "num_key_value_heads": chosen.kv_heads,
        "head_dim": chosen.head_dim,
        "max_position_embeddings": chosen.context_tokens,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "tie_word_embeddings": False,  # a random model with tied embeddings repeats its input
        **_extras(architecture, chosen),
    }
    model = AutoModelForCausalLM.from_config(_CONFIGS[architecture](**values), dtype=torch.float32)
    _draw_weights(model, seed)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    save_file(model.state_dict(), path / "model.safetensors", metadata={"format": "pt"})
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(path)
    model.generation_config.save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    return path


def _extras(architecture: str, sizes: TinySizes) -> dict[str, Any]:
    if architecture == "mistral":
        return {"sliding_window": sizes.sliding_window}
    if architecture == "gemma2":  # query scaling differs from head_dim's, and both caps take effect
        return {
            "sliding_window": sizes.sliding_window or 4096,
            "query_pre_attn_scalar": 2 * sizes.head_dim,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 30.0,
        }
    return {}


def _draw_weights(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() < 2:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                parameter.data *= _GAINS["q_proj"]  # the norm undoes the projection's gain
            continue
        gain = _GAINS.get(name.rsplit(".", 2)[-2], 1.0)
        scale = gain / parameter.shape[-1] ** 0.5
        parameter.data.normal_(0.0, scale, generator=generator)
    head = model.get_output_embeddings().weight.data
    head[: ord(" ")] = 0.0
    head[ord("~") + 1 :] = 0.0


_GAINS = {"q_proj": 2.0, "k_proj": 2.0, "o_proj": 2.0, "v_proj": 2.0, "lm_head": 3.0}
"""Scale of the weights by layer name, as a multiple of 1/sqrt(inputs). These scales make attention sharper and more
influential, so that answers vary."""


def _byte_alphabet() -> dict[int, str]:
    """Returns the printable character that GPT-2's tokenizer uses for each byte: the character with the byte's code,
    or a character with a code of 256 or more."""
    printable = [
        *range(ord("!"), ord("~") + 1),
        *range(ord("¡"), ord("¬") + 1),
        *range(ord("®"), ord("ÿ") + 1),
    ]
    alphabet = {byte: chr(byte) for byte in printable}
    for byte in range(BYTES):
        if byte not in alphabet:
            alphabet[byte] = chr(BYTES + len(alphabet) - len(printable))
    return alphabet
