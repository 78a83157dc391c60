"""Measures copies of pages to blocks of pinned host memory and back, as between tiers of the prefix cache.

The ceiling is a plain pinned copy of equal size.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from disagg.bench.common.measure import host_copy_rate, seconds_of
from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.kernels.page_copy import PageCopyBench, check
from disagg.kv.host_pool import HostPool


def run(bench: PageCopyBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures stores and loads for each row width, all layers at once. Raises `InvariantError` for wrong bytes.

    Each copy is measured with consecutive blocks, which on a GPU go through a buffer, and with scattered blocks,
    which a kernel accesses directly.
    """
    results: list[Result] = []
    for row_bytes in bench.row_bytes:
        for order in ("consecutive", "scattered"):
            report_progress(f"rows of {row_bytes} bytes, {order} blocks")
            results += _measure(bench, row_bytes, order)
    return results


def _measure(bench: PageCopyBench, row_bytes: int, blocks_order: str) -> list[Result]:
    pool = bench.pool(row_bytes)
    before = pool.clone()
    order = torch.randperm(pool.shape[2] // bench.page_size, generator=torch.Generator().manual_seed(0))
    sources, targets = order.view(2, -1).tolist()
    half_bytes = 0 if blocks_order == "scattered" else None
    host = HostPool([pool], bench.page_size, 2 * len(sources), half_bytes)
    host.warm()
    blocks = list(range(0, 2 * len(sources), 2) if blocks_order == "scattered" else range(len(sources)))
    random.Random(1).shuffle(blocks)
    host.memory.reserve(blocks)
    nbytes = len(sources) * bench.page_bytes(row_bytes)
    ways: dict[str, Callable[[], None]] = {
        "store": lambda: host.store(sources, blocks),
        "load": lambda: host.load(targets, blocks),
    }
    results = []
    for way, copy in ways.items():
        ceiling = host_copy_rate(bench.device, nbytes, bench.repeats, out=way == "store")
        seconds = seconds_of(copy, bench.device, bench.repeats)
        labels: dict[str, Label] = {
            "kernel": "host_cache",
            "way": way,
            "row_bytes": row_bytes,
            "blocks": blocks_order,
            "pages": len(sources),
            "layers": bench.layers,
            "page_size": bench.page_size,
        }
        rates = Measurement(way, "GB/s", tuple(nbytes / s / 1e9 for s in seconds))
        results.append(Result(f"{way}, rows of {row_bytes} B, {blocks_order} blocks", rates, ceiling, labels))
    check(before, pool, order, bench.page_size, "a store and a load")
    return results
