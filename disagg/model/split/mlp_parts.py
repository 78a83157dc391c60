"""The layers of MLPs that ranks share by their inner elements: a registry of transformers' classes.

A class without an entry is divided by the model's own plan, if it has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from disagg.model.layers.class_names import by_name
from disagg.model.layers.gated_mlps import GATED_MLPS


@dataclass(frozen=True)
class MLPParts:
    """The linear layers of an MLP, by the name within the module. The module may have other parts."""

    columns: tuple[str, ...]
    """Layers whose outputs are divided. The outputs are one or several sections of all inner elements, such as gate
    and up."""
    row: str
    """The layer whose inputs are the inner elements."""
    adapters: str = ""
    """Name of a list of pairs of linear layers. The second layer of a pair has the same outputs as a layer in
    `columns`, so its outputs are divided too. Other modules of the list are ignored. Empty without such a list."""

    def layers_of(self, module: Any) -> tuple[str, ...]:
        """Returns the names of the layers whose outputs are divided, adapters included."""
        pairs = enumerate(getattr(module, self.adapters, ()) if self.adapters else ())
        own = (f"{self.adapters}.{n}.1" for n, pair in pairs if isinstance(pair, nn.Sequential))
        return *self.columns, *own


_MLPS = by_name(
    (
        MLPParts(("gate_up_proj",), "down_proj"),
        """
        glm.GlmMLP glm4.Glm4MLP minimax_m3_vl.MiniMaxM3VLDenseMLP phi3.Phi3MLP phi4_multimodal.Phi4MultimodalMLP
        """,
    ),
    (MLPParts(("input_linear",), "output_linear"), "granitemoe_swa.GraniteMoeSWAMLP"),
    (MLPParts(("Wi",), "Wo"), "modernbert_decoder.ModernBertDecoderMLP"),
    (MLPParts(("gate_proj", "up_proj"), "down_proj"), "zamba.ZambaMLP"),
    (MLPParts(("gate_up_proj",), "down_proj", "gate_up_proj_adapter_list"), "zamba2.Zamba2MLP"),
    (MLPParts(("w1", "w3"), "w2"), "lfm2.Lfm2MLP lfm2_moe.Lfm2MoeMLP lfm3.Lfm3MLP"),
    (MLPParts(("up_proj",), "down_proj"), "apertus.ApertusMLP nemotron_h.NemotronHMLP"),
    (MLPParts(("dense_h_to_4h",), "dense_4h_to_h"), "persimmon.PersimmonMLP"),
    (MLPParts(("c_fc",), "c_proj"), "gpt_bigcode.GPTBigCodeMLP"),
    (MLPParts(("ffn.0",), "ffn.2"), "ctrl.EncoderLayer"),
    (
        MLPParts(("fc1",), "fc2"),
        "biogpt.BioGptDecoderLayer moshi.MoshiGatingMLP opt.OPTDecoderLayer xglm.XGLMDecoderLayer",
    ),
    (
        MLPParts(("intermediate.dense",), "output.dense"),
        """
        bert.BertLayer bert_generation.BertGenerationLayer camembert.CamembertLayer data2vec.Data2VecTextLayer
        electra.ElectraLayer ernie.ErnieLayer megatron_bert.MegatronBertLayer rembert.RemBertLayer
        roberta.RobertaLayer roberta_prelayernorm.RobertaPreLayerNormLayer roc_bert.RoCBertLayer
        roformer.RoFormerLayer xlm_roberta.XLMRobertaLayer xlm_roberta_xl.XLMRobertaXLLayer xmod.XmodLayer
        """,
    ),
)

MLP_PARTS = {name: MLPParts(form.layers[:-1], form.layers[-1]) for name, form in GATED_MLPS.items()} | _MLPS
"""Parts of MLPs by class name."""
