"""The RMSNorm classes of transformers whose results the kernel `rms_norm` reproduces bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from disagg.model.layers.class_names import by_name, class_name
from kernels.layers.rms_norm import DTYPES, NormWeight, add_rms_norm, rms_norm


@dataclass(frozen=True)
class NormForm:
    """The formula by which a class of norms computes its result."""

    weight: NormWeight
    """Order of weighting and rounding; one of `kernels.layers.rms_norm.NORM_WEIGHTS`."""
    epsilon: str
    """Name of the module's attribute that holds the epsilon."""


_LLAMA = NormForm("rounded_first", "variance_epsilon")
_LLAMA4 = NormForm("rounded_first", "eps")
_OLMO2 = NormForm("in_float32", "variance_epsilon")
_GEMMA = NormForm("one_plus", "eps")
_GEMMA4 = NormForm("in_float32", "eps")

NORMS = by_name(
    (
        _LLAMA,
        """
        apertus.ApertusRMSNorm arcee.ArceeRMSNorm aria.AriaTextRMSNorm axk1.AXK1RMSNorm axk2.AXK2RMSNorm
        bailing_hybrid.BailingHybridRMSNorm bamba.BambaRMSNorm bitnet.BitNetRMSNorm cwm.CwmRMSNorm
        deepseek_v2.DeepseekV2RMSNorm deepseek_v3.DeepseekV3RMSNorm deepseek_v32.DeepseekV32RMSNorm
        diffllama.DiffLlamaRMSNorm doge.DogeRMSNorm dots1.Dots1RMSNorm dots3_note.Dots3NoteRMSNorm
        ernie4_5.Ernie4_5RMSNorm ernie4_5_moe.Ernie4_5_MoeRMSNorm exaone4.Exaone4RMSNorm exaone_moe.ExaoneMoeRMSNorm
        falcon_h1.FalconH1RMSNorm falcon_mamba.FalconMambaRMSNorm glm.GlmRMSNorm glm4.Glm4RMSNorm
        glm4_moe.Glm4MoeRMSNorm glm4_moe_lite.Glm4MoeLiteRMSNorm glm_moe_dsa.GlmMoeDsaRMSNorm granite.GraniteRMSNorm
        granite_swa.GraniteSWARMSNorm granitemoe.GraniteMoeRMSNorm granitemoe_swa.GraniteMoeSWARMSNorm
        granitemoehybrid.GraniteMoeHybridRMSNorm granitemoeshared.GraniteMoeSharedRMSNorm
        hunyuan_v1_dense.HunYuanDenseV1RMSNorm hunyuan_v1_moe.HunYuanMoEV1RMSNorm hy_v3.HYV3RMSNorm
        hy_v4.HYV4RMSNorm hyperclovax.HyperCLOVAXRMSNorm jamba.JambaRMSNorm jetmoe.JetMoeRMSNorm
        kimi_linear.KimiLinearRMSNorm kolibri1.Kolibri1RMSNorm laguna.LagunaRMSNorm lfm2.Lfm2RMSNorm
        lfm2_moe.Lfm2MoeRMSNorm lfm3.Lfm3RMSNorm llama.LlamaRMSNorm longcat_flash.LongcatFlashRMSNorm
        mamba.MambaRMSNorm mamba2.Mamba2RMSNorm mellum.MellumRMSNorm mimo_v2_flash.MiMoV2FlashRMSNorm
        minicpm3.MiniCPM3RMSNorm minimax.MiniMaxRMSNorm minimax_m2.MiniMaxM2RMSNorm ministral.MinistralRMSNorm
        ministral3.Ministral3RMSNorm mistral.MistralRMSNorm mixtral.MixtralRMSNorm olmoe.OlmoeRMSNorm phi3.Phi3RMSNorm
        phi4_multimodal.Phi4MultimodalRMSNorm qwen2.Qwen2RMSNorm qwen2_moe.Qwen2MoeRMSNorm qwen3.Qwen3RMSNorm
        qwen3_moe.Qwen3MoeRMSNorm seed_oss.SeedOssRMSNorm smollm3.SmolLM3RMSNorm solar_open.SolarOpenRMSNorm
        youtu.YoutuRMSNorm zamba.ZambaRMSNorm zamba2.Zamba2RMSNorm zaya.ZayaRMSNorm
        """,
    ),
    (_LLAMA4, "llama4.Llama4TextRMSNorm"),
    (
        _OLMO2,
        """
        afmoe.AfmoeRMSNorm beam.BeamRMSNorm flex_olmo.FlexOlmoRMSNorm flint.FlintRMSNorm gpt_oss.GptOssRMSNorm
        helium.HeliumRMSNorm nemotron_h.NemotronHRMSNorm olmo2.Olmo2RMSNorm olmo3.Olmo3RMSNorm
        olmo_hybrid.OlmoHybridRMSNorm
        """,
    ),
    (
        _GEMMA,
        """
        gemma.GemmaRMSNorm gemma2.Gemma2RMSNorm gemma3.Gemma3RMSNorm minimax_m3_vl.MiniMaxM3VLRMSNorm
        qwen3_5.Qwen3_5RMSNorm qwen3_5_moe.Qwen3_5MoeRMSNorm qwen3_next.Qwen3NextRMSNorm vaultgemma.VaultGemmaRMSNorm
        """,
    ),
    (
        _GEMMA4,
        """
        gemma3n.Gemma3nRMSNorm gemma4.Gemma4RMSNorm gemma4_unified.Gemma4UnifiedRMSNorm moshi.MoshiRMSNorm
        """,
    ),
)
"""Forms of norms by class name."""


class FusedNorm:
    """Runs the kernel in place of the forward of a registered RMSNorm that has a weight.

    If the types of input and weight differ, the class's own forward is used.
    """

    def __init__(self, module: Any, form: NormForm) -> None:
        self._own, self._module = module.forward, module
        self._eps, self._how = float(getattr(module, form.epsilon)), form.weight
        self._added: tuple[torch.Tensor, torch.Tensor] | None = None
        """The sum that the latest call of `add` returned, and the sum's norm; None after the next call."""

    def __call__(self, x: torch.Tensor) -> Any:
        added, self._added = self._added, None
        if added is not None and added[0] is x:
            return added[1]
        if x.dtype != self._module.weight.dtype:
            return self._own(x)
        return rms_norm(x, self._module.weight, self._eps, self._how)

    def add(self, x: torch.Tensor, y: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        """Returns `x + y * factor`, and computes the sum's norm in the same launch.

        If the next call of this object passes the returned sum, the call returns the stored norm. A call with any
        other tensor drops the norm. The caller must not change the sum in place before the call.
        """
        if not x.dtype == y.dtype == self._module.weight.dtype:
            return x + (y if factor == 1.0 else y * factor)
        self._added = add_rms_norm(x, y, self._module.weight, self._eps, self._how, factor=factor)
        return self._added[0]


def fuse_norm(module: Any) -> bool:
    """Replaces the forward of a registered RMSNorm with a weight by the kernel. Returns whether it was replaced."""
    form, weight = NORMS.get(class_name(module)), module._parameters.get("weight")
    if form is None or weight is None or weight.dtype not in DTYPES:
        return False
    module.forward = FusedNorm(module, form)
    return True
