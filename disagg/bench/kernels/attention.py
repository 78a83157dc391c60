"""Measures the attention kernels and their ceilings on the same device, and checks the kernels' results.

The ceiling of decode is a plain read. The ceiling of prefill is torch's attention over contiguous K and V. The
ceiling of KV writes is a plain copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from disagg.bench.common.measure import copy_rate, recorded, rounding, seconds_of
from disagg.bench.common.read_rate import read_rate
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import ConfigError, InvariantError
from disagg.core.types import dtype_name
from disagg.kv.pool import MHATokenToKVPool
from disagg.model.attention.torch_attention import attend_decode
from kernels.attention.common import AttentionParams
from kernels.attention.decode import decode_attention
from kernels.attention.kv_write import kv_write
from kernels.attention.prefill import PackedQueries, prefill_attention
from kernels.dispatch import backend


@dataclass(frozen=True)
class AttentionBench:
    """Settings of a run. The defaults are one layer of an 8B model, on a rank that holds all heads."""

    device: torch.device
    repeats: int
    page_size: int = 16
    decodes: tuple[tuple[int, int], ...] = ((64, 4096), (8, 32768), (1, 131072))
    """Decode cases, as pairs (number of sequences, tokens of each sequence)."""
    prompt_tokens: int = 4096
    question_tokens: int = 64
    """Number of new tokens of a prompt whose first `prompt_tokens` tokens are already in the pool."""
    written_tokens: int = 65536
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    kv_dtypes: tuple[torch.dtype, ...] = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)

    def __post_init__(self) -> None:
        if backend(self.device) != "triton":
            raise ConfigError("the attention kernels need a GPU: give --device cuda on a machine with a GPU")

    @property
    def params(self) -> AttentionParams:
        """Returns the parameters of plain causal attention."""
        return AttentionParams(self.head_dim**-0.5)

    def random(self, tokens: int, heads: int, seed: int) -> torch.Tensor:
        """Returns `[tokens, heads, head_dim]`, normally distributed."""
        generator = torch.Generator(self.device).manual_seed(seed)
        shape = (tokens, heads, self.head_dim)
        return torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)

    def table(self, sequences: int, tokens: int) -> torch.Tensor:
        """Returns int32 `[sequences, tokens]`: slots of shuffled pages, without page 0."""
        pages = -(-tokens // self.page_size)
        order = torch.randperm(sequences * pages, device=self.device) + 1
        slots = order[:, None] * self.page_size + torch.arange(self.page_size, device=self.device)
        return slots.view(sequences, -1)[:, :tokens].int().contiguous()

    def filled(self, table: torch.Tensor, kv_dtype: torch.dtype) -> MHATokenToKVPool:
        """Returns a pool of one layer with noise in all slots of the table, written by `kv_write`."""
        slots = int(table.max()) + self.page_size
        pool = MHATokenToKVPool(1, slots, self.kv_heads, self.head_dim, kv_dtype, self.device)
        pool.poison()
        k, v = (self.random(table.numel(), self.kv_heads, seed) for seed in (1, 2))
        kv_write(k, v, table.view(-1), pool.layer(0))
        return pool


def run(bench: AttentionBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the attention kernels for each case and KV type. Raises `InvariantError` for wrong output."""
    sequences, tokens = bench.decodes[0]
    report_progress("device read and copy")
    nbytes = 2 * sequences * tokens * bench.kv_heads * bench.head_dim * bench.dtype.itemsize
    reads = read_rate(bench.device, nbytes, bench.repeats)
    copies = copy_rate(bench.device, bench.device, nbytes, bench.repeats)
    results = [Result("device read", reads, copies, {}, "a kernel that reads, and writes next to nothing")]
    for kv_dtype in bench.kv_dtypes:
        for sequences, tokens in bench.decodes:
            report_progress(f"decode, {sequences} x {tokens} tokens, {dtype_name(kv_dtype)}")
            results.append(_decode(bench, sequences, tokens, kv_dtype, reads))
    for kv_dtype in bench.kv_dtypes:
        report_progress(f"prefill, {dtype_name(kv_dtype)}")
        results.append(_prefill(bench, 0, bench.prompt_tokens, kv_dtype))
        results.append(_prefill(bench, bench.prompt_tokens, bench.question_tokens, kv_dtype))
        report_progress(f"K and V written, {dtype_name(kv_dtype)}")
        results.append(_write(bench, kv_dtype, copies))
    return results


def _decode(
    bench: AttentionBench, sequences: int, tokens: int, kv_dtype: torch.dtype, reads: Measurement
) -> Result:
    table = bench.table(sequences, tokens)
    pool = bench.filled(table, kv_dtype)
    q = bench.random(sequences, bench.kv_heads * bench.group, 3)
    out = torch.full_like(q, float("nan"))
    rows = torch.arange(sequences, device=bench.device)
    lengths = torch.full_like(rows, tokens)
    kv = pool.layer(0)

    def work() -> None:
        decode_attention(q, kv, table, rows, lengths, bench.params, out)

    seconds = seconds_of(work, bench.device, bench.repeats)
    _check_decode(bench, pool, table, q, out)
    nbytes = table.numel() * pool.buffer[0, :, 0].nbytes
    rates = tuple(nbytes / s / 1e9 for s in seconds)
    labels: dict[str, Label] = {"kernel": "decode", "sequences": sequences, "tokens": tokens}
    labels |= {"kv_dtype": dtype_name(kv_dtype), "page_size": bench.page_size}
    title = f"decode, {sequences} x {tokens} tokens, {dtype_name(kv_dtype)}"
    return Result(title, Measurement("decode", "GB/s", rates), reads, labels)


def _check_decode(
    bench: AttentionBench, pool: MHATokenToKVPool, table: torch.Tensor, q: torch.Tensor, out: torch.Tensor
) -> None:
    for row in (0, len(q) - 1):
        k, v = pool.read(0, table[row : row + 1].long(), torch.float32)
        grouped = q[row].float().view(1, bench.kv_heads, bench.group, -1)
        position = torch.tensor([table.shape[1] - 1], device=bench.device)
        expected = attend_decode(grouped, k, v, position, bench.params).view_as(out[row])
        _compare(out[row], expected, "decode attention")


def _prefill(bench: AttentionBench, start: int, count: int, kv_dtype: torch.dtype) -> Result:
    tokens, q_heads = start + count, bench.kv_heads * bench.group
    table = bench.table(1, tokens)
    pool = bench.filled(table, kv_dtype)
    q = bench.random(count, q_heads, 3)
    out = torch.full_like(q, float("nan"))
    zero, first, many = (torch.tensor([n], device=bench.device) for n in (0, start, count))
    queries, kv = PackedQueries(zero, zero, first, many, count), pool.layer(0)
    k, v = pool.read(0, table[0].long(), bench.dtype)
    whole_q, whole_k, whole_v = (x.transpose(0, 1)[None].contiguous() for x in (q, k, v))
    mask = causal_lower_right(count, tokens) if start else None

    def work() -> None:
        prefill_attention(q, kv, table, queries, bench.params, out)

    def sdpa() -> torch.Tensor:
        return scaled_dot_product_attention(
            whole_q, whole_k, whole_v, attn_mask=mask, is_causal=not start, enable_gqa=True
        )

    both = [recorded(one, bench.device) if start else one for one in (work, sdpa)]
    ours, theirs = (seconds_of(one, bench.device, bench.repeats) for one in both)
    _compare(out, sdpa()[0].transpose(0, 1), "prefill attention")
    flops = 4 * q_heads * bench.head_dim * (count * start + count * (count + 1) / 2)
    rates = [tuple(flops / s / 1e12 for s in seconds) for seconds in (ours, theirs)]
    labels: dict[str, Label] = {"kernel": "prefill", "tokens": count, "kv_dtype": dtype_name(kv_dtype)}
    labels["cached_tokens"] = start
    behind = f" behind {start}" if start else ""
    return Result(
        f"prefill, {count} tokens{behind}, {dtype_name(kv_dtype)}",
        Measurement("prefill", "TFLOP/s", rates[0]),
        Measurement("torch SDPA", "TFLOP/s", rates[1]),
        labels,
        "products of visible pairs only, 4 x head_dim for each; torch has contiguous K and V in the model's type",
    )


def _write(bench: AttentionBench, kv_dtype: torch.dtype, copies: Measurement) -> Result:
    tokens = bench.written_tokens
    slots = bench.table(1, tokens)[0]
    pool = MHATokenToKVPool(
        1, tokens + 2 * bench.page_size, bench.kv_heads, bench.head_dim, kv_dtype, bench.device
    )
    k, v = (bench.random(tokens, bench.kv_heads, seed) for seed in (1, 2))
    kv = pool.layer(0)
    seconds = seconds_of(lambda: kv_write(k, v, slots, kv), bench.device, bench.repeats)
    found = pool.buffer[0, :, slots.long()].clone()
    pool.poison()
    pool.write(0, slots.long(), k, v)
    if not torch.equal(found.view(torch.uint8), pool.buffer[0, :, slots.long()].view(torch.uint8)):
        raise InvariantError("kv_write has written other bytes than its reference")
    rates = tuple((k.nbytes + v.nbytes + found.nbytes) / s / 1e9 for s in seconds)
    labels: dict[str, Label] = {"kernel": "kv_write", "tokens": tokens, "kv_dtype": dtype_name(kv_dtype)}
    title = f"K and V of {tokens} tokens written, {dtype_name(kv_dtype)}"
    return Result(title, Measurement("kv_write", "GB/s", rates), copies, labels, "read plus written")


def _compare(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Compares two tensors `[..., heads, head_dim]`, token by token and head by head. Raises `InvariantError` if they
    differ by more than rounding."""
    allowed = rounding(found.dtype)
    error = (found.float() - expected.float()).norm(dim=-1) / expected.float().norm(dim=-1)
    worst = float(error.max())
    if not worst <= allowed:
        raise InvariantError(
            f"{what} is wrong by {worst:.2g} of a head's result; rounding explains {allowed:.2g}"
        )
