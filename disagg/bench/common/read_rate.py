"""The read bandwidth of a device's own memory: the ceiling of decode attention."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from disagg.bench.common.measure import random_bytes, seconds_of
from disagg.bench.common.report import Measurement
from kernels.attention.common import on_device

_BLOCK_WORDS = 8192  # of 4 bytes: 16 loads of 16 bytes per thread, all in flight at once


def read_rate(device: torch.device, nbytes: int, repeats: int) -> Measurement:
    """Measures a kernel that reads `nbytes` (rounded to blocks of 32 KiB) and stores the XOR of each block."""
    blocks = max(1, nbytes // (4 * _BLOCK_WORDS))
    words = random_bytes(blocks * _BLOCK_WORDS * 4, device).view(torch.int32)
    sums = torch.zeros(blocks, dtype=torch.int32, device=device)

    def read() -> None:
        with on_device(words):
            _read_kernel[(blocks,)](words, sums, BLOCK=_BLOCK_WORDS, num_warps=4, enable_fp_fusion=False)

    seconds = seconds_of(read, device, repeats)
    expected = words.view(blocks, -1)
    while expected.shape[1] > 1:
        half = expected.shape[1] // 2
        expected = expected[:, :half] ^ expected[:, half:]
    if not torch.equal(sums, expected[:, 0]):
        raise AssertionError("the read kernel has not read everything")
    return Measurement("device read", "GB/s", tuple(words.nbytes / s / 1e9 for s in seconds))


@triton.jit  # type: ignore[untyped-decorator]
def _read_kernel(words, sums, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def] # noqa: N803
    block = tl.program_id(0).to(tl.int64)
    found = tl.load(words + block * BLOCK + tl.arange(0, BLOCK), eviction_policy="evict_first")
    tl.store(sums + block, tl.xor_sum(found, 0))  # a sum would overflow, which the interpreter rejects
