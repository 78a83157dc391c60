"""Measures the swapping of pages to pinned host memory and back, as in a preemption, against a plain copy of equal
size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from disagg.bench.common.measure import host_copy_rate, random_bytes, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.core.errors import ConfigError, InvariantError, TransportError
from disagg.core.types import KVLayout, RequestKey
from disagg.kv.host_pool import block_bytes, page_bytes
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.transfer_pools import TransferPools
from disagg.node.plan import Swap
from disagg.node.swap import Swapper

_KEY = RequestKey("bench")


@dataclass(frozen=True)
class SwapBench:
    """Settings of a run: a request of `tokens` tokens on a rank with `kv_heads` heads of 128 elements in 16
    bits."""

    device: torch.device
    tokens: int
    kv_heads: int
    layers: int
    page_size: int
    repeats: int

    def __post_init__(self) -> None:
        if self.tokens < self.page_size:
            raise ConfigError(f"--tokens {self.tokens}: give a page of {self.page_size} tokens or more")

    @property
    def pages(self) -> int:
        """Number of pages of the request; the pool has twice as many pages."""
        return self.tokens // self.page_size

    @property
    def layout(self) -> KVLayout:
        """Layout of the pool."""
        return KVLayout(self.layers, self.kv_heads, 128, "bfloat16")

    @property
    def nbytes(self) -> int:
        """Bytes of the request's pages."""
        return self.pages * self.page_size * self.layout.token_bytes


def run(bench: SwapBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures swaps out and in, from the submission to the completion. Raises `InvariantError` for wrong bytes."""
    pool, swapper, failures = prepare(bench)
    order = torch.randperm(2 * bench.pages, generator=torch.Generator().manual_seed(0))
    source, target = (order + 1).view(2, -1).tolist()
    blocks = list(range(swapper.host.memory.blocks))
    results = []
    for name, out, pages in (("out", True, source), ("back", False, target)):
        report_progress(f"plain copy {name}")
        ceiling = host_copy_rate(bench.device, bench.nbytes, bench.repeats, out=out)
        report_progress(f"pages {name}")
        copy = partial(swapper.copy, Swap(_KEY, 0, out, pages, blocks), None)
        # Measure wall time, as on a CPU: each call returns after its copy has completed.
        seconds = seconds_of(copy, torch.device("cpu"), bench.repeats)
        if failures:
            raise TransportError(f"pages could not be swapped: {failures[0]}")
        rates = tuple(bench.nbytes / s / 1e9 for s in seconds)
        labels: dict[str, Label] = {
            "way": name,
            "nbytes": bench.nbytes,
            "pages": bench.pages,
            "page_size": bench.page_size,
            "layers": bench.layers,
            "kv_heads": bench.kv_heads,
            "blocks": len(blocks),
        }
        results.append(Result(f"pages {name}", Measurement(f"swap {name}", "GB/s", rates), ceiling, labels))
    swapper.stop()
    check(pool, bench.page_size, source, target)
    return results


def prepare(bench: SwapBench) -> tuple[MHATokenToKVPool, Swapper, list[str]]:
    """Returns a pool of noise, a swapper with room for the request, and a list that receives errors of swaps."""
    layout, slots = bench.layout, (2 * bench.pages + 1) * bench.page_size
    pool = MHATokenToKVPool(
        layout.layers, slots, layout.kv_heads, layout.head_dim, torch.bfloat16, bench.device
    )
    pool.buffer.view(torch.uint8).view(-1).copy_(random_bytes(pool.nbytes, bench.device))
    failures: list[str] = []
    swapper = Swapper(
        TransferPools.of(pool, None),
        bench.page_size,
        nbytes=bench.pages * block_bytes(page_bytes([pool.buffer], bench.page_size)),
        done=lambda swap, seconds, error: failures.append(error) if error else None,
    )
    return pool, swapper, failures


def check(pool: MHATokenToKVPool, page_size: int, source: list[int], target: list[int]) -> None:
    """Raises `InvariantError` unless the pages `target` equal those of `source`, byte for byte."""
    layers, kinds, slots, *row = pool.buffer.shape
    paged = pool.buffer.view(torch.int16).view(layers, kinds, slots // page_size, page_size, *row)
    if not torch.equal(paged[:, :, source], paged[:, :, target]):
        raise InvariantError("swapping moved wrong bytes")
