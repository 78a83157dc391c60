"""`disagg bench kernels`: flags for the benchmarks in `disagg.bench.kernels`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from disagg.cli.bench.common import (
    DeviceFlag,
    LayersFlag,
    OutputFlags,
    PageSizeFlag,
    RepeatsFlag,
    device_of,
    name_of,
    parse_numbers,
    progress,
    show_results,
)
from disagg.cli.options import with_options
from disagg.core.config.read import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from disagg.bench.common.report import Result


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Flags of `disagg bench kernels`."""

    what: Annotated[
        Literal[
            "copies",
            "checksum",
            "quantize",
            "page_copy",
            "host_cache",
            "attention",
            "sampling",
            "quantized",
            "experts",
            "quantized_experts",
        ],
        typer.Option(
            "--what",
            help="checksum: copies with and without it; quantize: gather to 8 bits; page_copy: pages within a pool; "
            "host_cache: pages to pinned host memory and back; "
            "attention: decode, prefill, writes of K and V (needs a GPU); sampling: a step of 256 requests; "
            "quantized: products with quantized weights; experts: a layer of Qwen3 30B A3B; "
            "quantized_experts: its products in fp8, and those of gpt-oss 20B in MXFP4.",
        ),
    ] = "copies"
    rows: Annotated[str, typer.Option("--rows", help="Bytes of a token's head slice, comma-separated.")] = (
        "256,512,1024,2048,4096"
    )
    size: Annotated[
        str | None, typer.Option("--size", metavar="SIZE", help="Segment size [1GiB; 16MiB on a CPU].")
    ] = None
    layers: LayersFlag = 32
    page_size: PageSizeFlag = 16
    repeats: RepeatsFlag = 9
    device: DeviceFlag = "auto"
    output: OutputFlags


@dataclass(frozen=True)
class KernelRun:
    """The benchmark that `--what` selects, with its names."""

    measure: Callable[[Callable[[str], None]], Sequence[Result]]
    """Function that runs the benchmark. Its argument is called with a description of the current measurement."""
    name: str
    """Name of the benchmark in the names of the result files."""
    title: str


@with_options(KernelOptions)
def kernels(options: KernelOptions) -> None:
    """Measure gather and scatter as a share of a plain copy on the same device, or other kernels (--what).

    On a CPU the figures are not shares: small copies stay in the CPU's caches and exceed the rate of a large plain
    copy.
    """
    from disagg.bench.common.report import without_ceilings

    device = device_of(options.device)
    runs = {
        "attention": _attention,
        "sampling": _sampling,
        "quantized": _quantized,
        "experts": _experts,
        "quantized_experts": _quantized_experts,
    }
    chosen = runs.get(options.what, _copies)(options, device)
    with progress() as update:
        results = chosen.measure(update)
    if (
        device.type == "cpu" and options.what != "checksum"
    ):  # the ceiling of a checksum is the same copy without one
        results = without_ceilings(results)
    show_results(chosen.name, f"{chosen.title} on {name_of(device)}", results, options.output)


def _attention(options: KernelOptions, device: Any) -> KernelRun:
    from disagg.bench.kernels import attention

    bench = attention.AttentionBench(device, options.repeats, options.page_size)
    return KernelRun(lambda update: attention.run(bench, update), "attention", "attention kernels")


def _sampling(options: KernelOptions, device: Any) -> KernelRun:
    from disagg.bench.kernels import sampling

    sizes = (256, 1 << 17) if device.type == "cuda" else (4, 1 << 12)
    bench = sampling.SamplingBench(device, *sizes, options.repeats)
    title = f"sampling of {bench.batch} requests, {bench.vocab} tokens in the vocabulary,"
    return KernelRun(lambda update: sampling.run(bench, update), "sampling", title)


def _quantized(options: KernelOptions, device: Any) -> KernelRun:
    from disagg.bench.kernels import quantized_linear as products

    bench = products.QuantizedLinearBench(device, options.repeats)
    if device.type != "cuda":
        bench = replace(bench, shapes=((64, 128),), rows=(1, 4), read_bytes=1 << 14)
    title = "products with quantized weights"
    return KernelRun(lambda update: products.run(bench, update), "quantized_linear", title)


def _experts(options: KernelOptions, device: Any) -> KernelRun:
    import torch

    from disagg.bench.kernels import experts

    bench = experts.ExpertsBench(device, options.repeats)
    if device.type != "cuda":
        bench = replace(bench, tokens=(1, 5), experts=6, choices=2, hidden=48, inner=40, dtype=torch.float32)
    title = f"{bench.experts} experts, {bench.choices} for each token,"
    return KernelRun(lambda update: experts.run(bench, update), "experts", title)


def _quantized_experts(options: KernelOptions, device: Any) -> KernelRun:
    import torch

    from disagg.bench.kernels import quantized_experts as products

    bench = products.QuantizedExpertsBench(device, options.repeats)
    if device.type != "cuda":
        sizes = tuple(replace(one, experts=4, choices=2, hidden=64, inner=32) for one in bench.sizes)
        bench = replace(bench, sizes=sizes, tokens=(1, 5), dtype=torch.float32)
    return KernelRun(lambda update: products.run(bench, update), "quantized_experts", "quantized experts")


def _copies(options: KernelOptions, device: Any) -> KernelRun:
    from disagg.bench.kernels import checksum, copies, host_cache, page_copy, quantize

    nbytes = parse_bytes(options.size) if options.size else (1 << 30 if device.type == "cuda" else 16 << 20)
    rows = parse_numbers("--rows", options.rows)
    sizes = (device, rows, nbytes, options.layers, options.page_size, options.repeats)
    mib = f"{nbytes >> 20} MiB"
    if options.what == "page_copy":
        pages = page_copy.PageCopyBench(*sizes)
        return KernelRun(lambda update: page_copy.run(pages, update), "page_copy", f"copies of pages, {mib},")
    if options.what == "host_cache":
        pages = page_copy.PageCopyBench(*sizes)
        title = f"pages to host memory and back, {mib},"
        return KernelRun(lambda update: host_cache.run(pages, update), "host_cache", title)
    bench = copies.KernelBench(*sizes)
    if options.what == "checksum":
        return KernelRun(lambda update: checksum.run(bench, update), "checksum", f"sums of {mib}")
    if options.what == "quantize":
        return KernelRun(lambda update: quantize.run(bench, update), "quantize", f"gathers of {mib}")
    return KernelRun(lambda update: copies.run(bench, update), "kernels", f"gather and scatter of {mib}")
