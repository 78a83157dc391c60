"""The parts of attention modules that belong to one head: a registry of transformers' classes.

Ranks share attention by heads. The registry names, for each class, the layers that compute heads, the order of the
heads in their outputs, and the attributes that depend on the number of heads. A class without an entry is divided by
the model's own plan, if it has plain projections of queries, keys and values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from disagg.core.types import Span
from disagg.model.layers.class_names import by_name, class_name
from disagg.model.spec.shapes import HeadShape

Sections = tuple[str, ...]
"""The outputs of a layer, in order: sections that hold the same number of elements for each of their heads.

`q`, `k` and `v` are queries, keys and values. `head` has any number of elements for each query head, and `group` for
each KV head.
"""
QKV: dict[str, Sections] = {"q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",)}


@dataclass(frozen=True)
class AttentionParts:
    """The layers and parameters of an attention module that are divided by heads, by the name within the module."""

    columns: Mapping[str, Sections] = field(default_factory=lambda: QKV)
    """Linear layers, and the sections of their outputs. A module may lack some of these layers."""
    row: str = "o_proj"
    """The linear layer whose inputs are the attention's output: the elements of V for each query head."""
    vectors: tuple[str, ...] = ()
    """Parameters with one element for each query head."""
    whole: tuple[str, ...] = ()
    """Parts that every rank needs whole. Vectors with the size of one head are whole, too."""
    norms: Mapping[str, str] = field(default_factory=dict)
    """RMS norms over all heads of a section, and the section."""
    sizes: Mapping[str, str] = field(default_factory=dict)
    """Attributes of the module that depend on the number of heads: `heads`, `groups` (KV heads), `q` (elements of all
    queries) or `k` (of all keys). A name that starts with `config.` belongs to the module's configuration."""
    blocks: int = 0
    """Number of blocks of heads, of which each rank needs whole ones; 0: heads need no blocks."""


class IndivisibleError(Exception):
    """Raised for a part of a model that ranks cannot share; the message is the reason."""


class HeadsOfRank:
    """The heads of an attention module that one rank has."""

    def __init__(self, shape: HeadShape, queries: Span, groups: Span, shared: int = 0) -> None:
        """`groups`: the rank's KV heads; a lower rank has the first `shared` of them too."""
        self._shape, self._queries, self._groups, self._shared = shape, queries, groups, shared

    def outputs(self, child: str, sections: Sections, outputs: int) -> tuple[Span, ...]:
        """Returns the rank's outputs of the layer `child`, of `outputs` outputs. Raises IndivisibleError."""
        found, start = [], 0
        for section in sections:
            count, own, elements = self._section(section, outputs)
            found.append(Span(start + own.start * elements, start + own.stop * elements))
            start += count * elements
        if start != outputs:
            raise IndivisibleError(f"its {child} has {outputs} out_features instead of {start}")
        return tuple(found)

    def shared_elements(self, section: str) -> int:
        """Returns the number of elements, the first ones of the rank in a section `q` or `k`, that a lower rank has
        too."""
        return self._shared * self._shape.k_dim if section == "k" else 0

    def inputs(self, child: str, inputs: int) -> Span:
        """Returns the rank's inputs of the layer `child` after the attention. Raises IndivisibleError."""
        elements = self._shape.v_dim
        if inputs != self._shape.q_heads * elements:
            raise IndivisibleError(
                f"its {child} has {inputs} in_features instead of {self._shape.q_heads * elements}"
            )
        return Span(self._queries.start * elements, self._queries.stop * elements)

    def size(self, kind: str) -> int:
        """Returns the rank's value of an attribute of the kind `kind`; see `AttentionParts.sizes`."""
        heads, groups, dim = len(self._queries), len(self._groups), self._shape.k_dim
        return {"heads": heads, "groups": groups, "q": heads * dim, "k": groups * dim}[kind]

    def _section(self, section: str, outputs: int) -> tuple[int, Span, int]:
        """Returns the number of heads in a section, the rank's heads, and the elements of a head."""
        shape = self._shape
        if section == "group":
            return shape.kv_heads, self._groups, outputs // shape.kv_heads
        if section in ("k", "v"):
            return shape.kv_heads, self._groups, shape.k_dim if section == "k" else shape.v_dim
        return shape.q_heads, self._queries, shape.k_dim if section == "q" else outputs // shape.q_heads


_PLAIN = AttentionParts()
_OUT = AttentionParts(row="out_proj")
_SINKS = AttentionParts(vectors=("sinks",))
_GATE: dict[str, Sections] = {"gate_proj": ("head",)}
_G: dict[str, Sections] = {"g_proj": ("head",)}
_OWN_GATE: dict[str, Sections] = {**QKV, "q_proj": ("head",)}  # each head's query, then its gate
_LATENT = AttentionParts(
    dict.fromkeys(("q_proj", "q_b_proj", "q_gate_proj", "kv_b_proj", "gate_proj", "g_proj"), ("head",)),
    whole=(
        "q_a_proj",
        "q_a_layernorm",
        "kv_a_proj_with_mqa",
        "kv_a_layernorm",
        "k_rope_only_layernorm",
        "indexer",
    ),
)
"""Multi-head latent attention. Each rank computes the latents, from which it computes queries, keys and values of its
heads."""
_BERT: dict[str, Sections] = {"self.query": ("q",), "self.key": ("k",), "self.value": ("v",)}
_BERT_NORMS = ("output.LayerNorm", "LayerNorm", "self_attn_layer_norm", "ln")
_MOSHI: dict[str, Sections] = {f"{name}.linear": sections for name, sections in QKV.items()}

_ALL: Sections = ("q", "k", "v")
_NEOX: dict[str, Sections] = {"query_key_value": ("head",)}  # query, key and value of a head are adjacent
_HEADS = {"num_heads": "heads"}


def _falcon(module: Any) -> AttentionParts:
    sections: Sections = _ALL if module.multi_query else ("head",)
    blocks = 0
    if module.new_decoder_architecture:  # for each KV head: its queries, key and value
        sections, blocks = ("group",), module.num_kv_heads
    sizes = {"num_heads": "heads", "num_kv_heads": "groups"}
    return AttentionParts({"query_key_value": sections}, "dense", sizes=sizes, blocks=blocks)


def _gpt_bigcode(module: Any) -> AttentionParts:
    sections = _ALL if module.multi_query else ("head",)
    return AttentionParts(
        {"c_attn": sections}, "c_proj", sizes={"num_heads": "heads", "embed_dim": "q", "kv_dim": "k"}
    )


_PARTS: dict[str, AttentionParts | Callable[[Any], AttentionParts]] = by_name(
    (
        _PLAIN,
        """
        bamba.BambaAttention falcon_h1.FalconH1Attention granitemoe.GraniteMoeAttention
        granitemoehybrid.GraniteMoeHybridAttention granitemoeshared.GraniteMoeSharedAttention
        hunyuan_v1_dense.HunYuanDenseV1Attention hunyuan_v1_moe.HunYuanMoEV1Attention jamba.JambaAttention
        minimax_m3_vl.MiniMaxM3VLAttention nemotron_h.NemotronHAttention phimoe.PhimoeAttention zamba.ZambaAttention
        zamba2.Zamba2Attention
        """,
    ),
    (_OUT, "lfm2.Lfm2Attention lfm2_moe.Lfm2MoeAttention"),
    (AttentionParts(row="out_proj", sizes={"num_heads": "heads"}), "opt.OPTAttention"),
    (AttentionParts(row="Wo"), "modernbert_decoder.ModernBertDecoderAttention"),
    (AttentionParts({"Wq": ("q",), "Wk": ("k",), "Wv": ("v",)}, "dense"), "ctrl.MultiHeadAttention"),
    (
        AttentionParts(sizes={"num_heads": "heads", "num_key_value_heads": "groups"}),
        "stablelm.StableLmAttention",
    ),
    (AttentionParts(_MOSHI, "o_proj.linear"), "moshi.MoshiAttention"),
    (
        _SINKS,
        """
        flint.FlintAttention gpt_oss.GptOssAttention granite_swa.GraniteSWAAttention
        granitemoe_swa.GraniteMoeSWAAttention mimo_v2_flash.MiMoV2FlashAttention
        """,
    ),
    (
        AttentionParts(_OWN_GATE),
        "qwen3_next.Qwen3NextAttention qwen3_5.Qwen3_5Attention qwen3_5_moe.Qwen3_5MoeAttention",
    ),
    (AttentionParts(QKV | _GATE), "afmoe.AfmoeAttention"),
    (AttentionParts(QKV | _GATE, vectors=("gate_bias",)), "beam.BeamAttention"),
    (AttentionParts(QKV | _G), "laguna.LagunaAttention lfm3.Lfm3Attention"),
    (
        AttentionParts(_BERT, "output.dense", whole=_BERT_NORMS),
        """
        bert.BertAttention bert_generation.BertGenerationAttention camembert.CamembertAttention
        data2vec.Data2VecTextAttention electra.ElectraAttention ernie.ErnieAttention
        megatron_bert.MegatronBertAttention rembert.RemBertAttention roberta.RobertaAttention
        roberta_prelayernorm.RobertaPreLayerNormAttention roc_bert.RoCBertAttention roformer.RoFormerAttention
        xlm_roberta.XLMRobertaAttention xlm_roberta_xl.XLMRobertaXLAttention xmod.XmodAttention
        """,
    ),
    (
        AttentionParts(
            {"qkv_proj": _ALL},
            sizes={"config.num_attention_heads": "heads", "num_key_value_heads": "groups"},
        ),
        "phi3.Phi3Attention phi4_multimodal.Phi4MultimodalAttention",
    ),
    (
        AttentionParts(
            {"Wqkv": _ALL}, "out_proj", sizes={"hidden_size": "q", "num_key_value_heads": "groups"}
        ),
        "dbrx.DbrxAttention",
    ),
    (AttentionParts({"Wqkv": _ALL}, "out_proj"), "mpt.MptAttention"),
    (AttentionParts(_NEOX, "dense"), "gpt_neox.GPTNeoXAttention"),
    (
        AttentionParts(_NEOX, "dense", whole=("dense_bias",)),
        "gpt_neox_japanese.GPTNeoXJapaneseAttention",
    ),
    (AttentionParts(_NEOX, "dense", sizes=_HEADS), "bloom.BloomAttention persimmon.PersimmonAttention"),
    (AttentionParts({"qkv_proj": ("head",)}, "out_proj", blocks=4), "codegen.CodeGenAttention"),
    (
        _LATENT,
        """
        axk1.AXK1Attention axk2.AXK2Attention bailing_hybrid.BailingHybridAttention deepseek_v2.DeepseekV2Attention
        deepseek_v3.DeepseekV3Attention deepseek_v32.DeepseekV32Attention dots3_note.Dots3NoteTextAttention
        glm4_moe_lite.Glm4MoeLiteAttention glm_moe_dsa.GlmMoeDsaAttention kimi_linear.KimiLinearAttention
        longcat_flash.LongcatFlashMLA minicpm3.MiniCPM3Attention youtu.YoutuAttention
        """,
    ),
    (replace(_LATENT, vectors=("sinks",)), "hy_v4.HYV4Attention"),
    (
        AttentionParts(norms={"q_norm": "q", "k_norm": "k"}),
        """
        flex_olmo.FlexOlmoAttention minimax_m2.MiniMaxM2Attention olmo2.Olmo2Attention olmo3.Olmo3Attention
        olmo_hybrid.OlmoHybridAttention olmoe.OlmoeAttention
        """,
    ),
    (_falcon, "falcon.FalconAttention"),
    (_gpt_bigcode, "gpt_bigcode.GPTBigCodeAttention"),
)


def attention_parts(module: Any) -> AttentionParts | None:
    """Returns the parts of a registered attention module; None for a module of another class."""
    found = _PARTS.get(class_name(module))
    return found(module) if callable(found) else found
