"""The recurrent kernels compile for Hopper; states of 4-byte elements are read and written 16 bytes at a time."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from attention_code import accesses_before_waiting, compiled
from triton.language import constexpr

from kernels.recurrent.causal_conv import causal_conv_kernel, conv_step_kernel
from kernels.recurrent.gated_delta import gated_delta_kernel
from kernels.recurrent.state_space import state_space_kernel

SLICES = dict.fromkeys(("slots", "firsts", "counts", "begun"), torch.int64)


@pytest.fixture(autouse=True)
def _cold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def code(kernel: Any, tensors: str, **more: Any) -> Any:
    """Code for bfloat16 `tensors`, a float32 state, and `more`; every other size is a multiple of 16."""
    sizes = [name for name in inspect.signature(kernel.fn).parameters if name.endswith("_stride")]
    given = {**dict.fromkeys(tensors.split(), torch.bfloat16), **dict.fromkeys(sizes, 2048), **SLICES}
    given |= {"state": torch.float32, **more}
    return compiled(
        kernel, {name: given[name] for name in kernel.arg_names if name != "OVERLAP"}, num_warps=4
    )


@pytest.mark.parametrize("biased", [False, True])
def test_the_convolution_compiles(biased: bool) -> None:
    bias = torch.bfloat16 if biased else None
    constants = {"TAPS": 4, "WINDOW": 4, "SILU": True, "BLOCK_CHANNELS": 128, "BLOCK_TOKENS": 16}
    more = {"bias": bias, "state": torch.bfloat16, "channels": 8192}
    ptx = str(code(causal_conv_kernel, "x weight out", **more, **constants).asm["ptx"])
    assert ptx.count("bar.sync") >= constants["WINDOW"], (
        "the old window is read before the new one is written"
    )


def test_a_step_of_the_convolution_moves_its_window_at_once() -> None:
    constants = {"TAPS": 4, "WINDOW": 4, "SILU": True, "BLOCK_CHANNELS": 256, "BLOCK_WINDOW": 4}
    more = {
        "bias": torch.bfloat16,
        "state": torch.bfloat16,
        "channels": 8192,
        "state_channel_stride": constexpr(4),
    }
    ptx = str(code(conv_step_kernel, "x weight out", **more, **constants).asm["ptx"])
    assert not accesses_before_waiting(ptx)
    window = ptx.rsplit("bar.sync", 1)[1]
    assert "st.global.v" in window, "the new window is written after all threads have read the old one"


@pytest.mark.parametrize(("per_channel", "early"), [(False, True), (True, False)])
def test_the_state_space_reads_its_state_16_bytes_at_a_time(per_channel: bool, early: bool) -> None:
    size, block = (16, 256) if per_channel else (128, 32)
    constants = {"SIZE": size, "PER_CHANNEL": per_channel, "D_PER_CHANNEL": per_channel}
    constants |= {"BLOCK_CHANNELS": block, "BLOCK_SIZE": size, "EARLY": early}
    numbers = {"channels": 64, "heads_per_group": 8, "least_dt": 0.0, "most_dt": 1e30}
    found = code(state_space_kernel, "x dt b c d dt_bias out", a=torch.float32, **numbers, **constants)
    assert_wide(found)
    assert accesses_before_waiting(str(found.asm["ptx"])) == ({"ld.global"} if early else set())


@pytest.mark.parametrize("per_element", [False, True])
def test_the_delta_rule_reads_its_state_16_bytes_at_a_time(per_element: bool) -> None:
    constants = {"KEY_DIM": 128, "PER_ELEMENT": per_element, "BLOCK_KEYS": 128, "BLOCK_VALUES": 32}
    numbers = {"value_dim": 128, "heads_per_key": 2, "scaling": 0.088}
    found = code(
        gated_delta_kernel, "q k v out", decay=torch.float32, beta=torch.bfloat16, **numbers, **constants
    )
    assert_wide(found)


def assert_wide(found: Any) -> None:
    ptx = str(found.asm["ptx"])
    assert "ld.global.v4.b32" in ptx
    assert "st.global.v4.b32" in ptx
