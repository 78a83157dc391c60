"""Selective state spaces over the tokens of packed sequences: Mamba-2 (SSD) and the selective scan of Mamba-1.

A head has a state `[channels, size]`. For each token, `state = exp(dt * a) * state + dt * x * b`, and the output is
the product of the state with `c`, plus `d * x`. In Mamba-2, `dt` and `a` have one number per head. In Mamba-1, `dt`
has one number per channel, and `a` one per element of the state.

A program computes a block of channels of one head of one sequence, token by token, with the state in registers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from kernels.attention.common import on_device
from kernels.dispatch import Backend
from kernels.overlap import overlap, wait_for_previous
from kernels.recurrent.slices import PackedSlices, require_shapes, uses_triton

_CHUNK_TOKENS = 64
_TILE_ELEMENTS = 4096
_STEP_ELEMENTS, _STEP_WARPS = 1024, 2
"""Elements of the state of a program with one token, and its warps: the fastest of ten tiles on an H200."""
_SOFTPLUS_LINEAR = tl.constexpr(20.0)
"""Value beyond which softplus is the identity, as in torch."""


@dataclass(frozen=True)
class StateSpace:
    """The parameters of a layer that do not depend on the tokens."""

    a: torch.Tensor
    """Decay rates, float32 `[heads]` (Mamba-2) or `[heads, channels, size]` (Mamba-1); negative."""
    d: torch.Tensor
    """`[heads]` or `[heads, channels]`: factor of the skip connection from input to output."""
    dt_bias: torch.Tensor
    """Bias of the time step, `[heads]` (Mamba-2) or `[heads, channels]` (Mamba-1)."""
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time step `softplus(dt + dt_bias)`."""

    @property
    def per_channel(self) -> bool:
        """Whether each channel has a separate time step (Mamba-1)."""
        return self.a.dim() == 3


def state_space(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    layer: StateSpace,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
    *,
    how: Backend = "torch",
) -> None:
    """Writes the outputs of the tokens in `slices` to `out`, and each sequence's new state to its slot.

    - x, out: float `[tokens, heads, channels]`; other tokens of `out` keep their values.
    - dt: float `[tokens, heads]`, or `[tokens, heads, channels]` if `layer.per_channel`; before bias and softplus.
    - b, c: float `[tokens, groups, size]`; consecutive heads share a group.
    - state: `[slots, heads, channels, size]`, contiguous within a slot.

    The last dimension of all tensors is contiguous, other strides are free. The computation is in float32; the state
    is rounded to its type after the last token of a slice. On CUDA, `how="triton"` is one launch on the current
    stream, without synchronization. If `slices.host` is None, the step's latest kernels must not have written the
    states of these slots or the numbers of `slices` (`kernels.overlap`). Raises ValueError (arguments) and
    ConfigError (Triton is not available).
    """
    _require(x, dt, b, c, layer, state, out)
    if not uses_triton(how, x.device):
        state_space_reference(x, dt, b, c, layer, state, slices, out)
        return
    if len(slices) and slices.most:
        _launch(x, dt, b, c, layer, state, slices, out)


def _launch(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    layer: StateSpace,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
) -> None:
    _, heads, channels = x.shape
    size = triton.next_power_of_2(b.shape[2])
    elements, warps = (_STEP_ELEMENTS, _STEP_WARPS) if slices.most == 1 else (_TILE_ELEMENTS, 4)
    block = min(triton.next_power_of_2(channels), max(1, elements // size))
    per_channel, launch = layer.per_channel, overlap(x.device)
    with on_device(x):
        state_space_kernel[(len(slices), heads, triton.cdiv(channels, block))](
            x,
            dt,
            b,
            c,
            layer.a.contiguous(),
            layer.d.contiguous(),
            layer.dt_bias.contiguous(),
            state,
            slices.slots,
            slices.firsts,
            slices.counts,
            slices.begun,
            out,
            channels,
            heads // b.shape[1],
            *layer.dt_limit,
            *x.stride()[:2],
            dt.stride(0),
            dt.stride(1),
            *b.stride()[:2],
            *c.stride()[:2],
            *out.stride()[:2],
            state.stride(0),
            SIZE=b.shape[2],
            PER_CHANNEL=per_channel,
            D_PER_CHANNEL=layer.d.dim() == 2,
            BLOCK_CHANNELS=block,
            BLOCK_SIZE=size,
            EARLY=slices.host is None and launch["OVERLAP"],
            num_warps=warps,
            **launch,
        )


def _require(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    layer: StateSpace,
    state: torch.Tensor,
    out: torch.Tensor,
) -> None:
    tokens, heads, channels = x.shape
    groups, size = b.shape[1:]
    if heads % groups:
        raise ValueError(f"b must have a divisor of {heads} groups; got {groups}")
    each = (heads, channels) if layer.per_channel else (heads,)
    require_shapes(
        x=(x, (tokens, heads, channels)),
        out=(out, (tokens, heads, channels)),
        b=(b, (tokens, groups, size)),
        c=(c, (tokens, groups, size)),
        a=(layer.a, (*each, size) if layer.per_channel else each),
        dt_bias=(layer.dt_bias, each),
        state=(state, (state.shape[0], heads, channels, size)),
        d=(layer.d, (heads, channels) if layer.d.dim() == 2 else (heads,)),
    )
    if tuple(dt.shape) != (tokens, *each) or (layer.per_channel and channels > 1 and dt.stride(2) != 1):
        raise ValueError(f"dt must be {[tokens, *each]}, contiguous in the channels; got {list(dt.shape)}")
    if state.stride()[1:] != (channels * size, size, 1):
        raise ValueError(f"state must be contiguous within a slot; got strides {list(state.stride())}")


def state_space_reference(
    x: torch.Tensor,
    dt: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    layer: StateSpace,
    state: torch.Tensor,
    slices: PackedSlices,
    out: torch.Tensor,
) -> None:
    """Computes `state_space` in plain torch, on any device.

    If each slice has one token (`slices.host` is None), all sequences run together. Otherwise sequences run one by
    one: in chunks for Mamba-2 (Dao and Gu, 2024), token by token for Mamba-1.
    """
    if slices.host is None:
        xs, steps, bs, cs = _in_float32([one.index_select(0, slices.firsts) for one in (x, dt, b, c)], layer)
        new = _next_state(xs, steps, bs, layer.a.float(), state.index_select(0, slices.slots).float())
        state.index_copy_(0, slices.slots, new.to(state.dtype))
        found = (new @ cs[..., None])[..., 0] + _skipped(xs, layer)
        out.index_copy_(0, slices.firsts, found.to(out.dtype))
        return
    for slot, first, count, begun in slices.host:
        if count:
            xs, steps, bs, cs = _in_float32([one[first : first + count] for one in (x, dt, b, c)], layer)
            held = state[slot].float() if begun else torch.zeros_like(state[slot], dtype=torch.float32)
            scan = _token_by_token if layer.per_channel else _in_chunks
            found, new = scan(xs, steps, bs, cs, layer.a.float(), held)
            out[first : first + count] = (found + _skipped(xs, layer)).to(out.dtype)
            state[slot] = new.to(state.dtype)


def _in_float32(tokens: list[torch.Tensor], layer: StateSpace) -> tuple[torch.Tensor, ...]:
    """Returns x, the time steps, and b and c repeated for each head, all in float32; `tokens`: x, dt, b and c."""
    x, dt, b, c = (one.float() for one in tokens)
    steps = F.softplus(dt + layer.dt_bias.float()).clamp(*layer.dt_limit)
    repeats = x.shape[1] // b.shape[1]
    return x, steps, b.repeat_interleave(repeats, dim=1), c.repeat_interleave(repeats, dim=1)


def _skipped(x: torch.Tensor, layer: StateSpace) -> torch.Tensor:
    d = layer.d.float()
    return x * (d if d.dim() == 2 else d[:, None])


def _next_state(
    x: torch.Tensor, steps: torch.Tensor, b: torch.Tensor, a: torch.Tensor, held: torch.Tensor
) -> torch.Tensor:
    """Returns the states of `n` sequences after one more token of each, `[n, heads, channels, size]`."""
    if a.dim() == 1:
        return held * (steps * a).exp()[..., None, None] + (x * steps[..., None])[..., None] * b[:, :, None]
    return held * (steps[..., None] * a).exp() + (x * steps)[..., None] * b[:, :, None]


def _token_by_token(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    held: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    found, held = torch.empty_like(x), held[None]
    for token in range(len(x)):
        one = slice(token, token + 1)
        held = _next_state(x[one], steps[one], b[one], a, held)
        found[token] = (held @ c[one, ..., None])[0, ..., 0]
    return found, held[0]


def _in_chunks(
    x: torch.Tensor,
    steps: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    a: torch.Tensor,
    held: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes a Mamba-2 layer for one sequence, `[tokens, heads, ...]`, from the state `held`.

    Returns the outputs `[tokens, heads, channels]` and the new state `[heads, channels, size]`.
    """
    found = torch.empty_like(x)
    for first in range(0, len(x), _CHUNK_TOKENS):
        span = slice(first, first + _CHUNK_TOKENS)
        inputs = (x[span] * steps[span][..., None]).transpose(0, 1)  # [heads, tokens, channels]
        keys, queries = b[span].transpose(0, 1), c[span].transpose(0, 1)  # [heads, tokens, size]
        levels = (steps[span] * a).double().cumsum(0).t()  # [heads, tokens]
        # In double, because these are differences of long sums.
        decays = (levels[:, :, None] - levels[:, None]).float().exp().tril()
        rest = (levels[:, -1:] - levels).float().exp()[..., None]
        levels = levels.float()
        own = (queries @ keys.mT * decays) @ inputs
        earlier = (queries * levels.exp()[..., None]) @ held.mT
        found[span] = (own + earlier).transpose(0, 1)
        held = held * levels[:, -1].exp()[:, None, None] + (inputs * rest).mT @ keys
    return found, held


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    power = tl.exp(tl.minimum(x, _SOFTPLUS_LINEAR))
    small = power * (1.0 - power * (0.5 - power * 0.3333333333))  # log(1 + power) would be imprecise
    soft = tl.where(power < 0.01, small, tl.log(1.0 + power))
    return tl.where(x > _SOFTPLUS_LINEAR, x, soft)


@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=["channels", "heads_per_group"],
    do_not_specialize_on_alignment=["slots", "firsts", "counts", "begun"],
)
def state_space_kernel(  # type: ignore[no-untyped-def]
    # tensors
    x,
    dt,
    b,
    c,
    a,
    d,
    dt_bias,
    state,
    slots,
    firsts,
    counts,
    begun,
    out,
    # sizes
    channels,
    heads_per_group,
    least_dt,
    most_dt,
    x_token_stride,
    x_head_stride,
    dt_token_stride,
    dt_head_stride,
    b_token_stride,
    b_group_stride,
    c_token_stride,
    c_group_stride,
    out_token_stride,
    out_head_stride,
    state_slot_stride,
    # meta
    SIZE: tl.constexpr,  # noqa: N803 - constexpr arguments are upper case throughout Triton
    PER_CHANNEL: tl.constexpr,  # noqa: N803
    D_PER_CHANNEL: tl.constexpr,  # noqa: N803
    BLOCK_CHANNELS: tl.constexpr,  # noqa: N803
    BLOCK_SIZE: tl.constexpr,  # noqa: N803
    EARLY: tl.constexpr,  # noqa: N803
    OVERLAP: tl.constexpr,  # noqa: N803
):
    if not EARLY:
        wait_for_previous(OVERLAP)
    index, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    count = tl.load(counts + index)
    channel = tl.program_id(2) * BLOCK_CHANNELS + tl.arange(0, BLOCK_CHANNELS)
    element = tl.arange(0, BLOCK_SIZE)
    inside, within = channel < channels, element < SIZE
    first = tl.load(firsts + index).to(tl.int64)  # int64 before any product
    x += first * x_token_stride + head * x_head_stride + channel
    out += first * out_token_stride + head * out_head_stride + channel
    group = head // heads_per_group
    b += first * b_token_stride + group * b_group_stride + element
    c += first * c_token_stride + group * c_group_stride + element
    dt += first * dt_token_stride + head * dt_head_stride
    both = inside[:, None] & within[None, :]
    tile = (head * channels + channel)[:, None] * SIZE + element[None, :]
    state += tl.load(slots + index).to(tl.int64) * state_slot_stride + tile
    held = tl.load(state, mask=both & (tl.load(begun + index) != 0), other=0.0).to(tl.float32)
    if EARLY:  # the states are read while the last programs of the convolution run
        wait_for_previous(OVERLAP)
    if PER_CHANNEL:
        rates = tl.load(a + tile, mask=both, other=0.0).to(tl.float32)
        added = tl.load(dt_bias + head * channels + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        rates = tl.load(a + head).to(tl.float32)
        added = tl.load(dt_bias + head).to(tl.float32)
    if D_PER_CHANNEL:
        skip = tl.load(d + head * channels + channel, mask=inside, other=0.0).to(tl.float32)
    else:
        skip = tl.load(d + head).to(tl.float32)
    for token in range(count):
        inputs = tl.load(x + token * x_token_stride, mask=inside, other=0.0).to(tl.float32)
        keys = tl.load(b + token * b_token_stride, mask=within, other=0.0).to(tl.float32)
        queries = tl.load(c + token * c_token_stride, mask=within, other=0.0).to(tl.float32)
        if PER_CHANNEL:
            raw = tl.load(dt + token * dt_token_stride + channel, mask=inside, other=0.0)
        else:
            raw = tl.load(dt + token * dt_token_stride)
        step = _softplus(raw.to(tl.float32) + added)
        step = tl.minimum(tl.maximum(step, least_dt), most_dt)
        held *= tl.exp((step[:, None] if PER_CHANNEL else step) * rates)
        held += (step * inputs)[:, None] * keys[None, :]
        found = tl.sum(held * queries[None, :], axis=1) + skip * inputs
        tl.store(out + token * out_token_stride, found.to(out.dtype.element_ty), mask=inside)
    tl.store(state, held.to(state.dtype.element_ty), mask=both & (count > 0))
