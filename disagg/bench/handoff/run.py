"""Measures the hand-over of requests from prefill to decode, with a real model on real ranks; checks every answer.

Each rank is a process; this process is their router. Each prompt is served three times: by the disaggregated system
(split), by the prefill group without a transfer, and by an engine that prefills and decodes on the prefill group's
ranks (unsplit).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec
import torch

from disagg.bench.common.ceilings import measure_ceilings
from disagg.bench.common.processes import Processes, visible_gpus
from disagg.bench.common.ranks import transport_choice
from disagg.bench.common.report import Label, Result
from disagg.bench.handoff.groups import HandoffGroups, client_of
from disagg.bench.handoff.measure import HandoffMeasurements, measure
from disagg.bench.handoff.results import results_of
from disagg.bench.handoff.sizes import ReportProgress, Sizes
from disagg.commands.local import with_model
from disagg.core.config.read import Config, DecodeConfig, GroupConfig, LogConfig, PrefillConfig
from disagg.core.errors import ConfigError
from disagg.core.types import QUANTIZED_DTYPES, dtype_name
from disagg.kv.pages import pages_for
from disagg.model.load.source import make_source
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.assemble import resolve_dtype, resolve_kv_dtype

GroupT = TypeVar("GroupT", bound=GroupConfig)


@dataclass(frozen=True, kw_only=True)
class HandoffOptions:
    """The options of `disagg bench handoff` that are not part of the configuration."""

    cuda: bool
    prefill_tp: int
    decode_tp: int
    decode_kv_dtype: str
    tokens: int
    """Length of the prompts that are handed over."""
    answer_tokens: int
    chunk_tokens: int
    decoders: int
    """Number of requests that decode while others arrive."""
    decoder_tokens: int
    """Length of the decoding requests' prompts."""
    steps: int
    """Number of tokens that each decoding request generates in a round."""
    repeats: int


@dataclass(frozen=True)
class HandoffBench:
    """Configuration and sizes of a run, made by `HandoffBench.of`."""

    config: Config
    sizes: Sizes
    cuda: bool
    labels: dict[str, Label]
    """The settings, for the report."""

    @classmethod
    def of(cls, config: Config, options: HandoffOptions) -> HandoffBench:
        """Returns a run whose groups have room for the requests.

        Raises `ConfigError` when the model's context is too short.
        """
        decode = msgspec.structs.replace(config.decode, kv_dtype=options.decode_kv_dtype)
        config = with_model(msgspec.structs.replace(config, decode=decode), lambda text: None)
        source = make_source(config)
        dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda" if options.cuda else "cpu"))
        computed = dtype_name(resolve_kv_dtype(config, config.prefill, dtype))
        spec = source.spec(resolve_kv_dtype(config, config.decode, dtype))
        sizes = _sizes(options, spec, dtype, computed, config.model.deterministic)
        config = msgspec.structs.replace(
            config,
            prefill=_with_room(PrefillConfig(tp=options.prefill_tp), options, sizes),
            decode=_with_room(
                DecodeConfig(tp=options.decode_tp, kv_dtype=config.decode.kv_dtype, local_prefill_tokens=0),
                options,
                sizes,
            ),
            log=LogConfig(level="warning"),
        )
        labels: dict[str, Label] = {
            "model": source.label,
            "dtype": str(dtype).removeprefix("torch."),
            "deterministic": int(config.model.deterministic),
            "prefill_kv_dtype": computed,
            "kv_dtype": spec.layout.dtype,
            "bytes": options.tokens * spec.layout.token_bytes,
            "bf16_bytes": options.tokens * msgspec.structs.replace(spec.layout, dtype="bfloat16").token_bytes,
            "compared_tokens": sizes.compared(options.answer_tokens),
            **_size_labels(options),
            **_transfer_labels(config),
        }
        return cls(config, sizes, options.cuda, labels)


def _sizes(
    options: HandoffOptions, spec: ModelSpec, dtype: torch.dtype, computed: str, deterministic: bool
) -> Sizes:
    """Returns the request sizes; `computed` is the prefill group's KV type.

    Raises `ConfigError` when the model's context is too short.
    """
    longest = max(options.tokens + options.answer_tokens, options.decoder_tokens + options.steps)
    if longest > spec.context_tokens:
        raise ConfigError(
            f"prompt and answer of {longest} tokens (--tokens, --decoder-tokens with --steps) exceed the "
            f"model's context of {spec.context_tokens}"
        )
    # An error in a float32 sum's last bit can move a value across the boundary of two quantized values.
    rounds = dtype != torch.float32 or spec.layout.dtype in QUANTIZED_DTYPES
    same_bits = deterministic and options.prefill_tp == options.decode_tp
    return Sizes(
        options.tokens,
        options.answer_tokens,
        options.decoders,
        options.decoder_tokens,
        options.steps,
        options.repeats,
        spec.vocab_size,
        tokens_equal=same_bits or not rounds,
        quantized_values_differ=computed != spec.layout.dtype,
    )


def _size_labels(options: HandoffOptions) -> dict[str, Label]:
    return {
        "prefill_tp": options.prefill_tp,
        "decode_tp": options.decode_tp,
        "tokens": options.tokens,
        "answer_tokens": options.answer_tokens,
        "chunk_tokens": options.chunk_tokens,
        "decoders": options.decoders,
        "decoder_tokens": options.decoder_tokens,
        "steps": options.steps,
    }


def _transfer_labels(config: Config) -> dict[str, Label]:
    transfer = config.transfer
    return {
        "layer_groups": transfer.layer_groups,
        "ring_bytes": transfer.ring_bytes,
        "staging_bytes": transfer.staging_bytes,
        "checksum": int(bool(transfer.checksum)),
        "transport": transport_choice(config).name,
    }


def run(bench: HandoffBench, report_progress: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Measures the ceilings, then hand-overs. Raises the errors of `measure` for wrong answers and wrong KV."""
    sizes = bench.sizes
    ceilings = measure_ceilings(bench.cuda, sizes.repeats, report_progress)
    report_progress("starting the ranks")
    with Processes() as processes:
        groups = HandoffGroups(bench.config, processes, visible_gpus() if bench.cuda else [])
        found = asyncio.run(_measure(groups, sizes, report_progress))
    return [*results_of(found, bench.labels, ceilings.ceiling), *ceilings.results()]


async def _measure(
    groups: HandoffGroups, sizes: Sizes, report_progress: ReportProgress
) -> HandoffMeasurements:
    async with client_of(groups) as client:
        return await measure(client, groups, sizes, report_progress)


def _with_room(group: GroupT, options: HandoffOptions, sizes: Sizes) -> GroupT:
    """Returns the group's configuration with room for all decoding requests and two arriving ones: the current one,
    and the previous one, whose memory may not be freed yet."""
    page = group.page_size
    each = (sizes.decoder_tokens + sizes.steps, sizes.tokens + sizes.answer_tokens)
    decoding, arriving = (page * pages_for(tokens, page) for tokens in each)
    device = "cuda" if options.cuda else "cpu"
    return msgspec.structs.replace(
        group,
        pool_tokens=sizes.decoders * decoding + 2 * arriving,
        max_requests=sizes.decoders + 2,
        max_context_tokens=max(each),
        device=device,
        chunk_tokens=options.chunk_tokens,
        prefix_cache=False,  # each prompt must be computed and sent, even a repeated one
    ).sized(device)
