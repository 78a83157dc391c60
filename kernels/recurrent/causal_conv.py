"""Causal depthwise convolution over the tokens of packed sequences (Mamba, gated delta nets, LFM2).

The state of a sequence is the window of its latest inputs. A program computes a block of channels for a block of
tokens of one sequence. Only the program of the first tokens reads the old window; the same program also writes the
new window. Decode steps have a kernel of their own, which reads and writes a window as a whole.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.attention.layer_kv import describe
from kernels.dispatch import Backend
from kernels.overlap import overlap, wait_for_previous
from kernels.recurrent.slices import PackedSlices, require_shapes, uses_triton

_BLOCK_CHANNELS = 128
_BLOCK_TOKENS = 16
_STEP_CHANNELS = 256
"""Channels of a program with one token. The programs of 64 sequences then run all at once."""


def causal_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
    *,
    silu: bool,
    how: Backend = "torch",
) -> None:
    """Writes the convolution of the tokens in `slices` to `out`, and each sequence's new window to its slot.

    - x, out: float `[tokens, channels]`, channels contiguous; other tokens of `out` keep their values.
    - weight, bias: `[channels, taps]`, contiguous, and `[channels]` or None; at least two and at most 16 taps.
    - state: `[slots, channels, window]`, the latest `window >= taps - 1` inputs, latest input last.
    - silu: whether to apply SiLU to the result.

    Sums are in float32 (Triton) or in the weight's type (torch). On CUDA, `how="triton"` is one launch on the current
    stream, without synchronization. Raises ValueError (arguments) and ConfigError (Triton is not available).
    """
    _require(x, weight, bias, state, out)
    if not uses_triton(how, x.device):
        causal_conv_reference(x, weight, bias, state, slices, out, silu=silu)
        return
    if not len(slices) or not slices.most:
        return
    channels, taps = weight.shape
    kernel, sizes = _kernel_of(state.shape[2], slices, x.device)
    blocks = triton.cdiv(channels, sizes["BLOCK_CHANNELS"]), triton.cdiv(slices.most, _BLOCK_TOKENS)
    with on_device(x):
        kernel[(len(slices), *blocks)](
            x,
            weight,
            bias,
            state,
            slices.slots,
            slices.firsts,
            slices.counts,
            slices.begun,
            out,
            channels,
            x.stride(0),
            out.stride(0),
            state.stride(0),
            state.stride(1),
            TAPS=taps,
            WINDOW=state.shape[2],
            SILU=silu,
            num_warps=4,
            **sizes,
        )


def _kernel_of(window: int, slices: PackedSlices, device: torch.device) -> tuple[Any, dict[str, Any]]:
    """Returns the kernel for `slices`, and the arguments that only this kernel has."""
    if slices.most > 1:
        return causal_conv_kernel, {"BLOCK_CHANNELS": _BLOCK_CHANNELS, "BLOCK_TOKENS": _BLOCK_TOKENS}
    sizes = {"BLOCK_CHANNELS": _STEP_CHANNELS, "BLOCK_WINDOW": triton.next_power_of_2(window)}
    return conv_step_kernel, {**sizes, **overlap(device)}


def _require(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, state: torch.Tensor, out: torch.Tensor
) -> None:
    channels, taps, window = weight.shape[0], weight.shape[1], state.shape[2]
    require_shapes(
        x=(x, (x.shape[0], channels)),
        out=(out, (x.shape[0], channels)),
        weight=(weight, (channels, taps)),
        state=(state, (state.shape[0], channels, window)),
    )
    if not 2 <= taps <= 16 or not taps - 1 <= window <= 16 or not weight.is_contiguous():
        raise ValueError(
            f"weight must be contiguous with 2 to 16 taps, and state have a window of taps - 1 to 16 inputs; got "
            f"{describe(weight)} and {describe(state)}"
        )
    if bias is not None:
        require_shapes(bias=(bias, (channels,)))


def causal_conv_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
    *,
    silu: bool,
) -> None:
    """Computes `causal_conv` in plain torch, on any device.

    If each slice has one token (`slices.host` is None), all sequences run together, otherwise one by one.
    """
    if slices.host is None:
        held = state.index_select(0, slices.slots)
        inputs = torch.cat([held, x.index_select(0, slices.firsts)[:, :, None].to(state.dtype)], dim=2)
        found = (inputs[:, :, -weight.shape[1] :].to(weight.dtype) * weight).sum(2)
        found = found if bias is None else found + bias
        state.index_copy_(0, slices.slots, inputs[:, :, 1:])
        out.index_copy_(0, slices.firsts, (F.silu(found) if silu else found).to(out.dtype))
        return
    for slot, first, count, begun in slices.host:
        if count:
            held = state[slot] if begun else torch.zeros_like(state[slot])
            inputs = torch.cat([held, x[first : first + count].t().to(state.dtype)], dim=1)
            seen = inputs[:, inputs.shape[1] - count - weight.shape[1] + 1 :].to(weight.dtype)
            found = F.conv1d(seen[None], weight[:, None], bias, groups=weight.shape[0])[0].t()
            state[slot] = inputs[:, -state.shape[2] :]
            out[first : first + count] = F.silu(found) if silu else found


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["x_stride", "out_stride"],
    do_not_specialize_on_alignment=["slots", "firsts", "counts", "begun"],
)
def causal_conv_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    weight,
    bias,
    state,
    slots,
    firsts,
    counts,
    begun,
    out,
    # sizes
    channels,
    x_stride,
    out_stride,
    state_slot_stride,
    state_channel_stride,
    # meta
    TAPS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    WINDOW: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
):
    index, block = tl.program_id(0), tl.program_id(2)
    count, ready = tl.load(counts + index), tl.load(begun + index) != 0
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = channel < channels
    first = tl.load(firsts + index).to(tl.int64)  # int64 before any product
    x += first * x_stride + channel
    out += first * out_stride + channel
    state += tl.load(slots + index).to(tl.int64) * state_slot_stride + channel * state_channel_stride
    for token in range(block * BLOCK_TOKENS, tl.minimum(count, (block + 1) * BLOCK_TOKENS)):
        total = tl.zeros([BLOCK_CHANNELS], tl.float32)
        for tap in tl.static_range(TAPS):
            place = token + (tap - TAPS + 1)
            new = tl.load(x + place * x_stride, mask=inside & (place >= 0), other=0.0).to(tl.float32)
            held = inside & (place < 0) & ready
            old = tl.load(state + (WINDOW + place), mask=held, other=0.0).to(tl.float32)
            factor = tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
            total += (new + old) * factor
        if bias is not None:
            total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
        if SILU:
            total = total / (1.0 + tl.exp(-total))
        tl.store(out + token * out_stride, total.to(out.dtype.element_ty), mask=inside)
    inside &= (block == 0) & (count > 0)
    for at in tl.static_range(WINDOW):
        place = count + (at - WINDOW)
        new = tl.load(x + place * x_stride, mask=inside & (place >= 0), other=0.0)
        held = inside & (place < 0) & ready
        old = tl.load(state + (WINDOW + place), mask=held, other=0.0)
        value = tl.where(place >= 0, new.to(tl.float32), old.to(tl.float32))
        tl.debug_barrier()  # all threads have read this place; later reads are of later places
        tl.store(state + at, value.to(state.dtype.element_ty), mask=inside)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["x_stride", "out_stride"],
    do_not_specialize_on_alignment=["slots", "firsts", "counts", "begun"],
)
def conv_step_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    weight,
    bias,
    state,
    slots,
    firsts,
    counts,
    begun,
    out,
    # sizes
    channels,
    x_stride,
    out_stride,
    state_slot_stride,
    state_channel_stride,
    # meta
    TAPS: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    WINDOW: tl.constexpr,  # noqa: N803
    SILU: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
    BLOCK_WINDOW: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    """Computes `causal_conv_kernel` for slices of at most one token, with the same bits."""
    wait_for_previous(OVERLAP)
    index = tl.program_id(0)
    count, ready = tl.load(counts + index), tl.load(begun + index) != 0
    channel = tl.program_id(1) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    inside = (channel < channels) & (count > 0)
    first = tl.load(firsts + index).to(tl.int64)  # int64 before any product
    new = tl.load(x + first * x_stride + channel, mask=inside, other=0.0).to(tl.float32)
    state += tl.load(slots + index).to(tl.int64) * state_slot_stride + channel * state_channel_stride
    at = tl.arange(0, BLOCK_WINDOW)[None, :]
    place = state[:, None] + at
    kept = inside[:, None] & (at < WINDOW - 1)
    moved = tl.load(place + 1, mask=kept & ready, other=0.0).to(tl.float32)
    moved = tl.where(at == WINDOW - 1, new[:, None], moved)
    total = tl.zeros([BLOCK_CHANNELS], tl.float32)
    for tap in tl.static_range(TAPS):
        if tap < TAPS - 1:
            value = tl.load(state + (WINDOW + 1 - TAPS + tap), mask=inside & ready, other=0.0).to(tl.float32)
        else:
            value = new
        total += value * tl.load(weight + channel * TAPS + tap, mask=inside, other=0.0).to(tl.float32)
    if bias is not None:
        total += tl.load(bias + channel, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    tl.store(out + first * out_stride + channel, total.to(out.dtype.element_ty), mask=inside)
    tl.debug_barrier()  # all threads have read the old window
    tl.store(place, moved.to(state.dtype.element_ty), mask=inside[:, None] & (at < WINDOW))
