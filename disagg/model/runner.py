"""One rank's model with its KV pool: runs steps of mixed prefill chunks and decode tokens."""

from __future__ import annotations

import torch

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.ports import Collective, LayerHook
from disagg.kv.pool import MHATokenToKVPool
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.model.attention import HeadMap
from disagg.model.batch import StepBatch, build_index, upload
from disagg.model.build import build_model
from disagg.model.collective import SingleCollective
from disagg.model.paged import AttentionContext, PagedStep, SharedHeads
from disagg.model.probe import ShapeProbe
from disagg.model.rope import long_tokens, wrap_ropes
from disagg.model.source import ModelSource
from disagg.model.spec import shard_of
from disagg.model.tp import RowParallelLinear, query_span


class ModelRunner:
    """Not thread-safe: the rank's compute thread owns it. All ranks of a group run the same steps in order.

    `spec` describes the whole model, `shard` the rank's part; `pool` holds its KV, `req_to_token` says where
    each request's tokens lie. Who schedules fills `req_to_token` before a step; page 0 of the pool is the
    trash page.
    """

    def __init__(
        self,
        source: ModelSource,
        *,
        collective: Collective,
        device: torch.device | str,
        dtype: torch.dtype,
        pool_tokens: int,
        page_size: int,
        rows: int,
        max_tokens: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        """Builds and loads the rank's part; every rank of the group must do so, in any order.

        `pool_tokens` slots, rounded down to whole pages of `page_size`, the trash page included; `rows`
        requests of up to `max_tokens` each; `kv_dtype` stores KV in another type than the model's `dtype`.
        Raises UnsupportedModelError or ConfigError, one line each.
        """
        self.device = torch.device(device)
        self.page_size = page_size
        self.pages = _whole_pages(pool_tokens, page_size)
        self.spec = source.spec(kv_dtype or dtype)
        if max_tokens > self.spec.context_tokens:
            raise ConfigError(
                f"max_tokens {max_tokens} is beyond the model's context of {self.spec.context_tokens} tokens"
            )
        layout = self.spec.layout
        self._collective = collective
        self._queries = query_span(self.spec, collective.rank, collective.size)
        self.shard = shard_of(layout, collective.rank, collective.size)
        self._model, sharding = build_model(source, self.spec, collective, self.device, dtype)
        self._whole_attention = sharding.whole_attention
        self.held_whole = set(sharding.whole)
        """Parts of the model that every rank of the group holds whole, because they cannot be split."""
        self._head_map = HeadMap(
            self._queries, self.shard.heads, self.spec.q_heads, layout.kv_heads, self.device
        )
        self._ropes = wrap_ropes(self._model, self.spec.rope_switch_tokens)
        self._probe()
        slots = self.pages * page_size
        self.pool = MHATokenToKVPool(
            layout.layers, slots, len(self.shard.heads), layout.head_dim, kv_dtype or dtype, self.device
        )
        self.req_to_token = ReqToTokenPool(rows, max_tokens, self.device)

    def forward(self, batch: StepBatch, on_layer: LayerHook | None = None) -> torch.Tensor:
        """Runs one step; float32 `[sequences, vocab]`, the logits after each sequence's last token.

        `on_layer(layer)` is called right after a layer's K and V were written (on a GPU: queued). Nothing
        waits for the device. Raises ValueError for an empty batch or a slice that the table cannot hold.
        """
        if not batch.sequences:
            raise ValueError("a step needs at least one sequence")
        index = build_index(batch, self.req_to_token)
        if self._ropes:
            long = upload(long_tokens(batch, self.spec.rope_switch_tokens), self.device).bool()[None]
            for rope in self._ropes:
                rope.long = long
        context: AttentionContext = PagedStep(self.pool, self._head_map, index, on_layer)
        if self._whole_attention:
            context = SharedHeads(context, self._queries, self.shard.heads, self._collective)
        return self._run(index.input_ids, index.positions, index.last, context)

    def _run(
        self, ids: torch.Tensor, positions: torch.Tensor, last: torch.Tensor, context: AttentionContext
    ) -> torch.Tensor:
        with torch.inference_mode():
            output = self._model(
                input_ids=ids,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=last,
                paged_context=context,
            )
            logits: torch.Tensor = output.logits[0].float()
        return logits

    def _probe(self) -> None:
        """One token through the model with no cache, no other rank, and attention that only looks."""
        probe, zero = ShapeProbe(), upload([0], self.device)
        rows = [module for module in self._model.modules() if isinstance(module, RowParallelLinear)]
        collectives = [row.collective for row in rows]
        for row in rows:
            row.collective = SingleCollective()
        try:
            logits = self._run(zero[None], zero[None], zero, probe)
        finally:
            for row, collective in zip(rows, collectives, strict=True):
                row.collective = collective
        heads = self.spec.layout.kv_heads if self._whole_attention else len(self.shard.heads)
        probe.require(self.spec, heads, self._model.config)
        if tuple(logits.shape) != (1, self.spec.vocab_size):
            raise UnsupportedModelError(
                f"{self.spec.architecture} is not supported: logits of a token are {tuple(logits.shape)} "
                f"for a vocabulary of {self.spec.vocab_size}"
            )


def _whole_pages(pool_tokens: int, page_size: int) -> int:
    if page_size < 1 or pool_tokens // page_size < 2:
        raise ConfigError(
            f"a pool of {pool_tokens} tokens has no room for 2 pages of {page_size} (one is the trash page); "
            f"give it at least {2 * max(1, page_size)} tokens"
        )
    return pool_tokens // page_size
