"""What a hand-over costs: a real model on real ranks, its KV moved while it is computed, every answer compared.

Ranks are processes; this one is their router. Prompts are served split, prefilled without being sent, and by the
unsplit engine on the prefill group's own ranks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import torch

from disagg.bench.ceilings import measure_ceilings
from disagg.bench.handoff_groups import Groups, client_of
from disagg.bench.handoff_measure import Found, measure
from disagg.bench.handoff_results import results_of
from disagg.bench.handoff_sizes import Sizes, Tell
from disagg.bench.processes import Processes, visible_gpus
from disagg.bench.ranks import transport_choice
from disagg.bench.report import Label, Result
from disagg.core.config import Config, GroupConfig, LogConfig
from disagg.core.errors import ConfigError
from disagg.core.types import QUANTIZED_DTYPES
from disagg.kv.pages import pages_for
from disagg.kv.pool import dtype_name
from disagg.node.assemble import make_source, resolve_dtype, resolve_kv_dtype
from disagg.serve_local import with_model


@dataclass(frozen=True)
class HandoffBench:
    """What to measure. Use `of`."""

    config: Config
    sizes: Sizes
    cuda: bool
    labels: dict[str, Label]
    """What was asked for, for the report."""

    @classmethod
    def of(
        cls,
        config: Config,
        *,
        cuda: bool,
        prefill_tp: int,
        decode_tp: int,
        decode_kv_dtype: str,
        tokens: int,
        answer_tokens: int,
        chunk_tokens: int,
        decoders: int,
        decoder_tokens: int,
        steps: int,
        repeats: int,
    ) -> HandoffBench:
        """Groups with as much room as is asked for. Raises `ConfigError` when the model has not."""
        decode = msgspec.structs.replace(config.decode, kv_dtype=decode_kv_dtype)
        config = with_model(msgspec.structs.replace(config, decode=decode), lambda text: None)
        source = make_source(config)
        dtype = resolve_dtype(config.model.dtype, source, torch.device("cuda" if cuda else "cpu"))
        computed = dtype_name(resolve_kv_dtype(config, config.prefill, dtype))
        spec = source.spec(resolve_kv_dtype(config, config.decode, dtype))
        longest = max(tokens + answer_tokens, decoder_tokens + steps)
        if longest > spec.context_tokens:
            raise ConfigError(
                f"prompt and answer of {longest} tokens (--tokens, --decoder-tokens with --steps) exceed the "
                f"model's context of {spec.context_tokens}"
            )
        # A sum that is off by a float32's last bit may be next to where two codes meet.
        rounds = dtype != torch.float32 or spec.layout.dtype in QUANTIZED_DTYPES
        same_bits = config.model.deterministic and prefill_tp == decode_tp
        sizes = Sizes(
            tokens,
            answer_tokens,
            decoders,
            decoder_tokens,
            steps,
            repeats,
            spec.vocab_size,
            tokens_equal=same_bits or not rounds,
            codes_differ=computed != spec.layout.dtype,
        )
        config = msgspec.structs.replace(
            config,
            prefill=_group(prefill_tp, cuda, sizes, chunk_tokens),
            decode=msgspec.structs.replace(
                _group(decode_tp, cuda, sizes, chunk_tokens), kv_dtype=decode.kv_dtype
            ),
            log=LogConfig(level="warning"),
        )
        transfer = config.transfer
        labels: dict[str, Label] = {
            "model": source.name if source.directory is None else source.directory.name,
            "dtype": str(dtype).removeprefix("torch."),
            "deterministic": int(config.model.deterministic),
            "prefill_kv_dtype": computed,
            "kv_dtype": spec.layout.dtype,
            "prefill_tp": prefill_tp,
            "decode_tp": decode_tp,
            "tokens": tokens,
            "bytes": tokens * spec.layout.token_bytes,
            "bf16_bytes": tokens * msgspec.structs.replace(spec.layout, dtype="bfloat16").token_bytes,
            "answer_tokens": answer_tokens,
            "compared_tokens": sizes.compared(answer_tokens),
            "chunk_tokens": chunk_tokens,
            "decoders": decoders,
            "decoder_tokens": decoder_tokens,
            "steps": steps,
            "layer_groups": transfer.layer_groups,
            "ring_bytes": transfer.ring_bytes,
            "staging_bytes": transfer.staging_bytes,
            "checksum": int(transfer.checksum),
            "transport": transport_choice(config).name,
        }
        return cls(config, sizes, cuda, labels)


def run(bench: HandoffBench, tell: Callable[[str], None] = lambda text: None) -> list[Result]:
    """Ceilings, then hand-overs. Raises what `measure` raises for wrong answers and wrong KV."""
    sizes = bench.sizes
    ceilings = measure_ceilings(bench.cuda, sizes.repeats, tell)
    tell("starting the ranks")
    with Processes() as processes:
        groups = Groups(bench.config, processes, visible_gpus() if bench.cuda else [])
        found = asyncio.run(_measure(groups, sizes, tell))
    return [*results_of(found, bench.labels, ceilings.ceiling), *ceilings.results()]


async def _measure(groups: Groups, sizes: Sizes, tell: Tell) -> Found:
    async with client_of(groups) as client:
        return await measure(client, groups, sizes, tell)


def _group(tp: int, cuda: bool, sizes: Sizes, chunk_tokens: int) -> GroupConfig:
    """Room for all decoders, and for two prompts that arrive: one may not be released yet."""
    page = GroupConfig().page_size
    each = (sizes.decoder_tokens + sizes.steps, sizes.tokens + sizes.answer_tokens)
    decoding, arriving = (page * pages_for(tokens, page) for tokens in each)
    return GroupConfig(
        tp=tp,
        pool_tokens=sizes.decoders * decoding + 2 * arriving,
        max_requests=sizes.decoders + 2,
        max_batch=sizes.decoders + 2,
        max_context_tokens=max(each),
        device="cuda" if cuda else "cpu",
        chunk_tokens=chunk_tokens,
        prefix_cache=False,  # each prompt is to be computed and sent, also the second time
    )
