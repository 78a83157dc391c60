"""The Triton kernels themselves, without a GPU: their tests again, in a process that interprets Triton.

Triton decides at import whether to interpret, so a process that has imported the kernels is too late for it.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent.parent
ROOT = TESTS.parent
COPIES = (
    "kernels/copy/test_copy_kernels.py",
    "kernels/copy/test_layer_pools.py",
    "kernels/copy/test_move_kernel.py",
    "kernels/copy/test_page_copy.py",
    "kernels/copy/test_page_blocks.py",
    "kernels/copy/test_checksum.py",
    "kernels/copy/test_quantize.py",
    "kernels/copy/test_slot_gaps.py",
)
ATTENTION = (
    "kernels/attention/test_prefill_attention.py",
    "kernels/attention/test_decode_attention.py",
    "kernels/attention/test_kv_write.py",
)
LAYERS = (
    "kernels/layers/test_small_layers.py",
    "kernels/layers/test_rank_sum.py",
    "kernels/layers/test_expert_kernels.py",
    "kernels/layers/test_expert_quantized.py",
    "model/experts/test_grouped_experts.py",
    "model/experts/test_quantized_forward.py",
    "kernels/layers/test_few_rows.py",
    "kernels/layers/test_one_row.py",
    "kernels/layers/test_quantized_linear.py",
)
SAMPLING = (
    "kernels/sampling/test_draw.py",
    "kernels/sampling/test_penalties.py",
    "kernels/sampling/test_token_mask.py",
)
RECURRENT = (
    "kernels/recurrent/test_causal_conv.py",
    "kernels/recurrent/test_state_space.py",
    "kernels/recurrent/test_gated_delta.py",
    "model/recurrent/test_packed_steps.py::test_decode_steps_need_no_host",
)
RECURRENT_MODELS = ("model/recurrent/test_packed_steps.py::test_the_kernels_give_the_tokens_of_generate",)
MODELS = (
    "model/attention/test_attention_kernels.py::test_greedy_equals_generate",
    "model/attention/test_attention_kernels.py::test_a_quantized_pool_gives_what_the_torch_path_gives",
)
BENCHMARKS = (
    "bench/kernels/test_bench_attention.py::test_figures_have_ceilings",
    "bench/kernels/test_bench_attention.py::test_wrong_results_are_no_figure",
)
SWEEPS = (
    "kernels/attention/test_prefill_attention.py",
    "kernels/attention/test_decode_attention.py",
    "kernels/copy/test_checksum.py",
    "kernels/sampling/test_draw.py",
    "model/recurrent/test_packed_steps.py::test_decode_steps_need_no_host",
    *MODELS,
)
SMALL_SWEEPS = (
    "kernels/copy/test_copy_kernels.py",
    "kernels/copy/test_layer_pools.py",
    "kernels/layers/test_small_layers.py",
    "kernels/layers/test_few_rows.py",
    "kernels/layers/test_one_row.py",
    "kernels/layers/test_quantized_linear.py",
    "model/experts/test_grouped_experts.py",
)


@pytest.mark.parametrize(
    ("tests", "marked"),
    [
        pytest.param(
            (*COPIES, *LAYERS, *ATTENTION, *SAMPLING, *RECURRENT, *MODELS, *BENCHMARKS),
            "not slow and not gpu",
            id="all kernels",
        ),
        pytest.param(RECURRENT_MODELS, "not slow and not gpu", id="recurrent models", marks=pytest.mark.slow),
        pytest.param(SWEEPS, "slow and not gpu", id="rest of the sweeps", marks=pytest.mark.slow),
        pytest.param(SMALL_SWEEPS, "slow and not gpu", id="rest of the small sweeps", marks=pytest.mark.slow),
    ],
)
@pytest.mark.timeout(600)
def test_tests_pass_in_the_interpreter(tests: tuple[str, ...], marked: str) -> None:
    """All in one process, because its imports take longer than most of the tests."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "DISAGG_KERNELS": "triton"}
    environment["PYTHONPATH"] = f"{ROOT}:{TESTS / 'support'}"
    chosen = ["-m", marked, "-k", "not reference and not cuda"]
    plugins = ["-p", "no:cacheprovider", "-p", "interpreted_triton"]
    command = ["-m", "pytest", *plugins, *chosen, *(str(TESTS / name) for name in tests)]
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=580
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
