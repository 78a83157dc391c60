"""`disagg bench`: what this machine and this code give, each figure beside its ceiling."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from disagg.cli_bench_common import (
    ComparedDeterministicFlag,
    DeviceFlag,
    JsonFlag,
    OutFlag,
    Shown,
    device_of,
    name_of,
    progress,
    show,
)
from disagg.core.config import parse_bytes
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.report import Result
    from disagg.core.config import TransferConfig

app = typer.Typer(help="Measure this machine; every figure with its ceiling, every byte checked.")

TransportFlag = Annotated[
    Literal["auto", "ucx"],
    typer.Option("--transport", help="ucx: always through staging and ring, also where pools can be opened."),
]
ChecksumFlag = Annotated[
    bool, typer.Option("--checksum/--no-checksum", help="Of each segment, as transfer.checksum.")
]
RepeatsFlag = Annotated[int, typer.Option("--repeats", min=1, help="Measurements of each figure.")]


@app.command()
def kernels(
    what: Annotated[
        Literal["copies", "checksum", "quantize", "page_copy", "attention"],
        typer.Option(
            "--what",
            help="checksum: copies with and without; quantize: the gather to 8 bits; page_copy: pages within a pool; "
            "attention: decode, prefill, writes of K and V (needs a GPU).",
        ),
    ] = "copies",
    rows: Annotated[
        str, typer.Option("--rows", help="Bytes of a token's head slice, comma-separated.")
    ] = "256,512,1024,2048,4096",
    size: Annotated[
        str | None, typer.Option("--size", metavar="SIZE", help="Segment size [1GiB; 16MiB on a CPU].")
    ] = None,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 32,
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")] = 16,
    repeats: RepeatsFlag = 9,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """Gather and scatter as a share of a plain copy on the same device; or other kernels, see --what."""
    from disagg.bench.kernels import KernelBench, run

    where = device_of(device)
    if what == "attention":
        from disagg.bench import attention

        with progress() as tell:
            results = attention.run(attention.AttentionBench(where, repeats, page_size), tell)
        _show("attention", f"attention kernels on {name_of(where)}", results, out, as_json)
        return
    nbytes = parse_bytes(size) if size else (1 << 30 if where.type == "cuda" else 16 << 20)
    options = (where, _numbers("--rows", rows), nbytes, layers, page_size, repeats)
    if what == "page_copy":
        from disagg.bench import page_copy

        with progress() as tell:
            results = page_copy.run(page_copy.PageCopyBench(*options), tell)
        _show("page_copy", f"copies of pages, {nbytes >> 20} MiB, on {name_of(where)}", results, out, as_json)
        return
    bench = KernelBench(*options)
    if what == "checksum":
        from disagg.bench import checksum

        with progress() as tell:
            results = checksum.run(bench, tell)
        _show("checksum", f"sums of {nbytes >> 20} MiB on {name_of(where)}", results, out, as_json)
        return
    if what == "quantize":
        from disagg.bench import quantize

        with progress() as tell:
            results = quantize.run(bench, tell)
        _show("quantize", f"gathers of {nbytes >> 20} MiB on {name_of(where)}", results, out, as_json)
        return
    with progress() as tell:
        results = run(bench, tell)
    _show("kernels", f"gather and scatter of {nbytes >> 20} MiB on {name_of(where)}", results, out, as_json)


@app.command()
def collective(
    ranks: Annotated[int, typer.Option("--ranks", min=2, help="Processes.")] = 2,
    sizes: Annotated[
        str, typer.Option("--sizes", help="Bytes of a tensor, comma-separated.")
    ] = "8192,65536,1048576,16777216",
    dtype: Annotated[str, typer.Option("--dtype", help="float32 or bfloat16.")] = "float32",
    repeats: RepeatsFlag = 5,
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """All-reduces of ranks without a GPU each, in shared memory, beside gloo's."""
    from disagg.bench.collective import CollectiveBench, run

    bench = CollectiveBench(ranks, tuple(_numbers("--sizes", sizes)), dtype, repeats)
    with progress() as tell:
        results = run(bench, tell)
    _show("collective", f"all-reduce of {dtype} over {ranks} ranks on the CPU", results, out, as_json)


@app.command()
def swap(
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Of a request [8192; 512 on a CPU].")
    ] = None,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, help="Of the rank, 128 x 2 bytes each.")] = 8,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 32,
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")] = 16,
    repeats: RepeatsFlag = 9,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """A preempted request's pages to pinned host memory and back, as a share of a plain copy."""
    from disagg.bench.swap import SwapBench, run

    where = device_of(device)
    count = tokens or (8192 if where.type == "cuda" else 512)
    bench = SwapBench(where, count, kv_heads, layers, page_size, repeats)
    with progress() as tell:
        results = run(bench, tell)
    _show(
        "swap", f"pages of {bench.nbytes >> 20} MiB out and back on {name_of(where)}", results, out, as_json
    )


@app.command()
def wire(
    sizes: Annotated[
        str, typer.Option("--sizes", help="Of a message, comma-separated, such as 64KiB.")
    ] = "64KiB,1MiB,16MiB,64MiB",
    lanes: Annotated[str, typer.Option("--lanes", help="Connections of TLS, comma-separated.")] = "1,2",
    most: Annotated[str, typer.Option("--most", metavar="SIZE", help="Bytes of one measurement.")] = "512MiB",
    repeats: RepeatsFlag = 5,
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """The data plane's backends in host memory, between two processes: TLS, UCX, and plain TCP as the ceiling."""
    from disagg.bench.wire import WireBench, run

    bench = WireBench(
        tuple(parse_bytes(size.strip()) for size in sizes.split(",")),
        _numbers("--lanes", lanes),
        parse_bytes(most),
        repeats,
    )
    with progress() as tell:
        results = run(bench, tell)
    _show("wire", "messages between two processes of this host, host memory", results, out, as_json)


@app.command()
def transfer(
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, help="Ranks that send.")] = 1,
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=1, help="Ranks that receive.")] = 1,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, help="Of the whole model.")] = 8,
    layers: Annotated[int, typer.Option("--layers", min=1)] = 32,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1)] = 128,
    dtype: Annotated[
        str, typer.Option("--dtype", help="Element type of the KV, by torch's name.")
    ] = "bfloat16",
    tokens: Annotated[
        str | None,
        typer.Option("--tokens", help="Sizes of requests, comma-separated [128,4096; 128 on a CPU]."),
    ] = None,
    prefill_page_size: Annotated[int, typer.Option("--prefill-page-size", min=1)] = 16,
    decode_page_size: Annotated[int, typer.Option("--decode-page-size", min=1)] = 16,
    in_flight: Annotated[
        int, typer.Option("--in-flight", min=2, help="Requests under way at once, back to back.")
    ] = 8,
    layer_groups: Annotated[
        int, typer.Option("--layer-groups", min=1, help="At most; as transfer.layer_groups.")
    ] = 4,
    ring_bytes: Annotated[
        str, typer.Option("--ring-bytes", metavar="SIZE", help="Of each decode rank [by its memory].")
    ] = "0",
    staging_bytes: Annotated[
        str, typer.Option("--staging-bytes", metavar="SIZE", help="Of each prefill rank [by its memory].")
    ] = "0",
    transport: TransportFlag = "auto",
    checksum: ChecksumFlag = True,
    peer: Annotated[
        Literal["none", "nixl"],
        typer.Option("--peer", help="nixl: the same by NIXL's descriptors too, for comparison."),
    ] = "none",
    nixl_threads: Annotated[
        int, typer.Option("--nixl-threads", min=0, help="That NIXL posts descriptors with.")
    ] = 4,
    repeats: RepeatsFlag = 9,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """KV pool to KV pool between two groups of ranks, as a share of a plain copy between their devices."""
    from disagg.bench.nixl_peer import compare, require
    from disagg.bench.transfer import TransferBench, run
    from disagg.core.config import Config, TransportConfig
    from disagg.core.types import DTYPE_BYTES, KVLayout

    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"--dtype {dtype}: give one of {', '.join(DTYPE_BYTES)}")
    if peer == "nixl":
        require()
    where = device_of(device)
    bench = TransferBench(
        layout=KVLayout(layers, kv_heads, head_dim, dtype),
        tokens=_numbers("--tokens", tokens or ("128,4096" if where.type == "cuda" else "128")),
        in_flight=in_flight,
        repeats=repeats,
        cuda=where.type == "cuda",
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        prefill_page_size=prefill_page_size,
        decode_page_size=decode_page_size,
        config=Config(
            transfer=_transfer(where, ring_bytes, staging_bytes, layer_groups, checksum),
            transport=TransportConfig(peer_memory=transport == "auto"),
        ),
    )
    with progress() as tell:
        results = run(bench, tell)
        if peer == "nixl":
            results = compare(bench, results, nixl_threads, tell)
    title = f"pool to pool, TP {prefill_tp} -> {decode_tp}, {dtype} on {name_of(where)}"
    _show("transfer", title, results, out, as_json)


@app.command()
def handoff(
    model: Annotated[
        str | None, typer.Option("--model", metavar="DIR", help="Folder of a Hugging Face checkpoint.")
    ] = None,
    random_init: Annotated[
        str | None,
        typer.Option(
            "--random-init", metavar="NAME", help="Random weights [llama-3.1-8b; a small one on a CPU]."
        ),
    ] = None,
    dtype: Annotated[str, typer.Option("--dtype", help="auto, float32, bfloat16 or float16.")] = "auto",
    deterministic: ComparedDeterministicFlag = None,
    kv_dtype: Annotated[
        str, typer.Option("--kv-dtype", help="Of KV in both groups and between them, as model.kv_dtype.")
    ] = "auto",
    decode_kv_dtype: Annotated[
        str,
        typer.Option(
            "--decode-kv-dtype", help="Of KV in the decode group, and so on the wire, as decode.kv_dtype."
        ),
    ] = "model",
    prefill_tp: Annotated[int, typer.Option("--prefill-tp", min=1, help="Ranks that prefill.")] = 1,
    decode_tp: Annotated[int, typer.Option("--decode-tp", min=1, help="Ranks that decode.")] = 1,
    tokens: Annotated[
        int | None, typer.Option("--tokens", min=1, help="Of a prompt [8192; 512 on a CPU].")
    ] = None,
    answer_tokens: Annotated[
        int, typer.Option("--answer-tokens", min=2, help="Compared of each prompt.")
    ] = 8,
    chunk_tokens: Annotated[
        int | None, typer.Option("--chunk-tokens", min=1, help="Of one prefill step [2048; 128 on a CPU].")
    ] = None,
    decoders: Annotated[
        int, typer.Option("--decoders", min=1, help="Requests that decode while others arrive.")
    ] = 4,
    decoder_tokens: Annotated[
        int | None, typer.Option("--decoder-tokens", min=1, help="Of their prompts [1024; 64 on a CPU].")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option("--steps", min=2, help="Tokens that each of them decodes [512; 256 on a CPU]."),
    ] = None,
    layer_groups: Annotated[
        int, typer.Option("--layer-groups", min=1, help="At most; as transfer.layer_groups.")
    ] = 4,
    ring_bytes: Annotated[
        str, typer.Option("--ring-bytes", metavar="SIZE", help="Of each decode rank [by its memory].")
    ] = "0",
    staging_bytes: Annotated[
        str, typer.Option("--staging-bytes", metavar="SIZE", help="Of each prefill rank [by its memory].")
    ] = "0",
    transport: TransportFlag = "auto",
    checksum: ChecksumFlag = True,
    repeats: RepeatsFlag = 5,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """A real model, prefilled by one group and decoded by another: what the transfer costs, answers compared.

    With --deterministic and as many ranks on both sides, and in float32, every token must be equal. Else, in 16 bits
    and with KV in 8, the first difference of an answer must be one that rounding explains: both sides' logits there
    are compared behind the same tokens. The KV that was moved is compared in every byte. Where the decode group alone
    has KV in 8 bits, answers are compared in their first token, and the bytes with those of the prefill group's KV,
    quantized.
    """
    from disagg.bench.handoff import HandoffBench, run
    from disagg.core.config import Config, ModelConfig, TransportConfig

    where = device_of(device)
    cuda = where.type == "cuda"
    if cuda and not model:
        random_init = random_init or "llama-3.1-8b"
    bench = HandoffBench.of(
        Config(
            model=ModelConfig(
                path=model,
                random_init=random_init,
                dtype=cast("Any", dtype),
                kv_dtype=cast("Any", kv_dtype),
                deterministic=cuda if deterministic is None else deterministic,
            ),
            transfer=_transfer(where, ring_bytes, staging_bytes, layer_groups, checksum),
            transport=TransportConfig(peer_memory=transport == "auto"),
        ),
        cuda=cuda,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        decode_kv_dtype=decode_kv_dtype,
        tokens=tokens or (8192 if cuda else 512),
        answer_tokens=answer_tokens,
        chunk_tokens=chunk_tokens or (2048 if cuda else 128),
        decoders=decoders,
        decoder_tokens=decoder_tokens or (1024 if cuda else 64),
        steps=steps or (512 if cuda else 256),
        repeats=repeats,
    )
    with progress() as tell:
        results = run(bench, tell)
    title = f"hand-over of {bench.sizes.tokens} tokens, TP {prefill_tp} -> {decode_tp}, on {name_of(where)}"
    _show("handoff", title, results, out, as_json)


@app.command()
def decode(
    random_init: Annotated[
        str | None,
        typer.Option("--random-init", metavar="NAME", help="Its shape [llama-3.1-8b; a small one on a CPU]."),
    ] = None,
    dtype: Annotated[Literal["float32", "bfloat16", "float16"], typer.Option("--dtype")] = "bfloat16",
    batch: Annotated[int, typer.Option("--batch", min=1, help="Requests in the step.")] = 64,
    context_tokens: Annotated[
        int | None, typer.Option("--context-tokens", min=1, help="Of each [2048; 128 on a CPU].")
    ] = None,
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")] = 16,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="Also with model.deterministic, and prefill steps: what it costs."
        ),
    ] = False,
    prefill_tokens: Annotated[
        int, typer.Option("--prefill-tokens", min=1, help="Of a prefill step, with --deterministic.")
    ] = 4096,
    repeats: RepeatsFlag = 9,
    device: DeviceFlag = "auto",
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """A decode step of a whole model: how fast it reads its weights and KV, as a share of a plain copy."""
    import torch

    from disagg.bench.decode import DecodeBench, run

    where = device_of(device)
    cuda = where.type == "cuda"
    name = random_init or ("llama-3.1-8b" if cuda else "tiny-llama")
    context = context_tokens or (2048 if cuda else 128)
    bench = DecodeBench(
        where,
        name,
        getattr(torch, dtype),
        batch,
        context,
        page_size,
        repeats,
        deterministic,
        prefill_tokens,
    )
    with progress() as tell:
        results = run(bench, tell)
    _show("decode", f"decode steps in {dtype} on {name_of(where)}", results, out, as_json)


@app.command()
def memory(
    page_size: Annotated[int, typer.Option("--page-size", min=1, help="Tokens of a page.")] = 16,
    cached_tokens: Annotated[
        int, typer.Option("--cached-tokens", min=1, help="In the prefix cache.")
    ] = 100_000,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Half of them cached.")] = 4096,
    eviction: Annotated[Literal["lru", "lfu", "fifo"], typer.Option("--eviction")] = "lru",
    requests: Annotated[int, typer.Option("--requests", min=1, help="That decode together.")] = 256,
    input_tokens: Annotated[
        str, typer.Option("--input-tokens", help="Of those: 512, 128-1024, lognormal:MEAN,SIGMA,MAX.")
    ] = "sharegpt-like",
    output_tokens: Annotated[
        str, typer.Option("--output-tokens", help="Of their answers, in the same way.")
    ] = "sharegpt-like",
    repeats: RepeatsFlag = 9,
    out: OutFlag = None,
    as_json: JsonFlag = False,
) -> None:
    """What the books of KV memory cost the host, and how many slots pages waste. Needs no device."""
    from disagg.bench.memory import MemoryBench, run
    from disagg.bench.serve.lengths import parse_lengths

    bench = MemoryBench(
        page_size=page_size,
        cached_tokens=cached_tokens,
        prompt_tokens=prompt_tokens,
        requests=requests,
        input=parse_lengths("--input-tokens", input_tokens),
        output=parse_lengths("--output-tokens", output_tokens),
        eviction=eviction,
        repeats=repeats,
    )
    with progress() as tell:
        results = run(bench, tell)
    title = f"KV memory, pages of {page_size}: {prompt_tokens} of {cached_tokens} cached tokens; decode of {requests}"
    _show("memory", title, results, out, as_json)


def _numbers(flag: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as exc:
        raise ConfigError(f"{flag} {text}: give whole numbers separated by commas") from exc


def _transfer(
    device: Any, ring_bytes: str, staging_bytes: str, layer_groups: int, checksum: bool
) -> TransferConfig:
    """As a rank on `device` would have it."""
    from disagg.core.config import TransferConfig
    from disagg.node.device import memory_bytes

    ring, staging = parse_bytes(ring_bytes), parse_bytes(staging_bytes)
    config = TransferConfig(
        ring_bytes=ring, staging_bytes=staging, layer_groups=layer_groups, checksum=checksum
    )
    return config.sized(memory_bytes(device))


def _show(name: str, title: str, results: Sequence[Result], out: Path | None, print_json: bool) -> None:
    from disagg.bench.report import as_json, definition_lines, results_table, write_chart

    show(
        name,
        Shown(
            lambda: as_json(results),
            lambda: results_table(title, results),
            [f"- {line}" for line in definition_lines(results)],
            lambda path: write_chart(path, title, results),
        ),
        out,
        print_json,
    )
