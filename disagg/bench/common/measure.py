"""Times work on a device, and measures the ceilings of plain copies."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch

from disagg.bench.common.report import Measurement

_INNER = 6  # launches between two events: the queue is never empty, so the host's launch time does not count
_WARM_UPS = 2
_CALLS = 200
_ROUNDED = 4.0  # error that one layer's rounding may cause, in units of the type's epsilon
_SUMMED = 1e-5  # relative error that another order of float32 sums may cause

cuda: Any = torch.cuda  # events of torch.cuda are untyped


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int) -> tuple[float, ...]:
    """Returns the seconds of `work` on the device, measured `repeats` times after a warm-up; on a CPU, wall
    time."""
    for _ in range(_WARM_UPS):
        work()
    return tuple(_on_gpu(work) if device.type == "cuda" else _on_cpu(work) for _ in range(repeats))


def rounding(dtype: torch.dtype, layers: int = 1) -> float:
    """Returns the largest relative difference, in norm, that rounding can explain between two results.

    Each layer rounds weights, values and its result to `dtype`, differently on the two sides; float32 sums differ in
    order.
    """
    return max(_ROUNDED * torch.finfo(dtype).eps * math.sqrt(layers), _SUMMED)


def recorded(work: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """Returns `work` as a CUDA graph, so that launches do not limit short kernels; on a CPU, `work` itself."""
    if device.type != "cuda":
        return work
    work()  # compiles
    graph = cuda.CUDAGraph()
    with cuda.graph(graph):
        work()
    replay: Callable[[], object] = graph.replay
    return replay


def host_us(work: Callable[[], object], device: torch.device) -> float:
    """Returns the mean host time of a call of `work` in microseconds; on a CPU, the time includes the work itself."""
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started_s = time.perf_counter()
    for _ in range(_CALLS):
        work()
    return (time.perf_counter() - started_s) / _CALLS * 1e6


def copy_rate(source: torch.device, destination: torch.device, nbytes: int, repeats: int) -> Measurement:
    """Measures a plain contiguous copy. On one device: GB/s read plus written; between two: GB/s moved."""
    here = random_bytes(nbytes, source)
    there = torch.zeros(nbytes, dtype=torch.uint8, device=destination)
    seconds = seconds_of(lambda: there.copy_(here), source, repeats)
    if not torch.equal(there.to(source), here):
        raise AssertionError("a plain copy moved wrong bytes")
    moved = 2 * nbytes if source == destination else nbytes
    name = "device copy" if source == destination else "peer copy"
    return Measurement(name, "GB/s", tuple(moved / s / 1e9 for s in seconds))


def host_copy_rate(device: torch.device, nbytes: int, repeats: int, *, out: bool) -> Measurement:
    """Measures one contiguous copy from the device to pinned memory (`out`) or back; on a CPU, within host memory."""
    here = random_bytes(nbytes, device)
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
    host.copy_(here)
    source, target = (here, host) if out else (host, here)
    seconds = seconds_of(lambda: target.copy_(source, non_blocking=True), device, repeats)
    return Measurement("plain copy", "GB/s", tuple(nbytes / s / 1e9 for s in seconds))


def random_bytes(nbytes: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Returns uint8 `[nbytes]` of noise."""
    generator = torch.Generator(device).manual_seed(seed)
    words = -(-nbytes // 8)
    noise = torch.randint(-(2**63), 2**63 - 1, (words,), generator=generator, device=device)
    return noise.view(torch.uint8)[:nbytes]


def _on_gpu(work: Callable[[], object]) -> float:
    first, last = cuda.Event(enable_timing=True), cuda.Event(enable_timing=True)
    first.record()
    for _ in range(_INNER):
        work()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3 / _INNER


def _on_cpu(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s
