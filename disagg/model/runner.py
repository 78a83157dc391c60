"""One rank's model with its KV pool: runs steps of mixed prefill chunks and decode tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import msgspec
import structlog
import torch

from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.ports import Collective, LayerHook
from disagg.kv.mamba_pool import MambaPool, StateForm, state_classes
from disagg.kv.pool import KVPool, MHATokenToKVPool, make_pool, whole_pages
from disagg.kv.req_to_token import ReqToTokenPool
from disagg.kv.transfer_pools import TransferPools
from disagg.kv.upload import upload
from disagg.model.attention.indexed import index_step, wrap_indexers
from disagg.model.attention.kernel_step import KernelStep, use_kernels
from disagg.model.attention.layer_classes import AttentionClass, ClassedStep, Make
from disagg.model.attention.paged import AttentionContext, PagedStep, SharedHeads, StepAttention
from disagg.model.attention.probe import ShapeProbe, without_other_ranks
from disagg.model.attention.torch_attention import HeadMap
from disagg.model.batch import (
    KernelIndex,
    StepBatch,
    build_index,
    index_of_chunks,
    one_token_each,
    require_fits,
)
from disagg.model.collective.base import all_agree, least
from disagg.model.experts.grouped import group_experts
from disagg.model.experts.quantized import computes_by_expert, use_one_tile
from disagg.model.experts.quantized_check import check_experts
from disagg.model.graphs import (
    ChunkGraphs,
    Compute,
    DecodeGraphs,
    StepGraphs,
    batch_sizes,
    chunk_sizes,
    context_limits,
)
from disagg.model.head import ModelHead
from disagg.model.layers.few_rows import FewRowsSwitch, use_few_rows
from disagg.model.layers.fused import fuse
from disagg.model.layers.kept_rows import KeptRows
from disagg.model.layers.merged import merge_projections, use_few_rows_merged
from disagg.model.layers.quantized_check import check_products
from disagg.model.layers.residuals import keep_rows
from disagg.model.layers.rope import long_tokens, wrap_ropes
from disagg.model.layers.row_wise import RowWise, use_linear_kernels
from disagg.model.load.build import build_model
from disagg.model.load.source import ModelSource
from disagg.model.mixed_graphs import MixedGraphs, MixedNumbers, MixedSize
from disagg.model.page_copies import copy_in_order
from disagg.model.piecewise import SEQUENCES, PiecewiseGraphs, piece_sizes
from disagg.model.recurrent.heads import divided
from disagg.model.recurrent.registry import bounds_prompts, pack_recurrent
from disagg.model.recurrent.request_cache import StateCache, cache_argument, make_cache
from disagg.model.recurrent.split import RecurrentSplit
from disagg.model.recurrent.state import (
    PoolLayers,
    RowStates,
    cached_states,
    ignores_state,
    recurrent_parts,
    state_rows,
)
from disagg.model.recurrent.step import PackedStates, RecurrentStep, decode_step, is_answer, step_of
from disagg.model.runner_options import RunnerOptions
from disagg.model.sampled_tokens import SampledTokenBuffer
from disagg.model.sampling.prompt_scores import PromptScores, ScoredTokens
from disagg.model.spec.layer_types import attention_layers, recurrent_layers
from disagg.model.spec.model_spec import shard_of
from disagg.model.tensor_parallel import query_spans
from disagg.model.trial import TrialSteps
from kernels.attention.prefill import PackedQueries
from kernels.dispatch import backend
from kernels.layers.matmul import require_same_bits
from kernels.overlap import overlapping

log = structlog.get_logger(__name__)


class ModelRunner:
    """Runs one rank's part of a model. Not thread-safe; all ranks of a group run the same steps in the same order.

    `spec` describes the whole model and `shard` the rank's part; `pool` holds the KV, and the block table
    `req_to_token` maps each request's positions to slots. The scheduler fills `req_to_token` before a step. Page 0
    of the pool is the trash page.
    """

    def __init__(
        self,
        source: ModelSource,
        options: RunnerOptions,
        *,
        collective: Collective,
        device: torch.device | str,
    ) -> None:
        """Builds and loads the rank's part of the model. Every rank of the group must do this, at about the same
        time.

        Raises UnsupportedModelError or ConfigError, with a message of one line.
        """
        self.device = torch.device(device)
        self.collective = collective
        self._agreed = partial(all_agree, collective, self.device)
        """`graphs.Agreed` of this group. Ranks can differ, for example, in whether the kernels compute attention."""
        self._options = options
        self.page_size = options.page_size
        self.pages = whole_pages(options.pool_tokens, options.page_size)
        self.kv_dtype = options.kv_dtype or options.dtype
        self.deterministic, self._few_rows = options.deterministic, FewRowsSwitch()
        self.spec = source.spec(self.kv_dtype)
        if options.max_tokens > self.spec.context_tokens:
            raise ConfigError(
                f"max_tokens = {options.max_tokens} exceeds the model's context of {self.spec.context_tokens} tokens"
            )
        self.shard = shard_of(self.spec.layout, collective.rank, collective.size)
        """The rank's part of the KV and of the recurrent states. The states' shapes are known after a trial step."""
        built = build_model(source, self.spec, collective, self.device, options.dtype)
        self.model = built.model
        self._whole_attention, self.held_whole = built.sharding.whole_attention, set(built.sharding.whole)
        """Names of the model parts that cannot be split, so that every rank of the group holds them whole."""
        self._classes = self._attention_classes()
        replaced = self._use_layer_kernels()
        self._check_quantized()
        self._row_wise: RowWise | None = None
        self._ropes = wrap_ropes(self.model, self.spec.rope_switch_tokens)
        self._indexers = wrap_indexers(self.model, self.spec.places)
        self._head = ModelHead(self.model)
        self._cache_name = cache_argument(self.model)
        probe, self._kept = ShapeProbe(), KeptRows()
        self._packed: PackedStates | None = None
        """Recurrent states for packed steps; None if the model has no registered recurrent modules."""
        self.source, self._state_forms = source, self._probe(probe, built.split)
        self.shard = shard_of(self.spec.layout, collective.rank, collective.size)
        self.attention_kernels = self._use_attention_kernels(probe)
        """Whether attention runs in the Triton kernels, not in torch."""
        if self.deterministic:
            self._use_row_wise(options.dtype)
        self.keep_few_rows()
        if replaced and collective.rank == 0:
            log.info("small_layers_fused", model=self.spec.architecture, **replaced)
        self.req_to_token = ReqToTokenPool(self._rows(), options.max_tokens, self.device)
        self.pool, self.states = self._make_pool(), self._make_states()
        self.sampled = SampledTokenBuffer(options.rows, collective, self.device)
        """Sampled tokens of the previous step, to which the next step's input may refer."""
        self._graphs: StepGraphs | None = None
        self._mixed: MixedGraphs | None = None
        self._pieces: PiecewiseGraphs | None = None

    def _use_layer_kernels(self) -> dict[str, int]:
        """Puts kernels in place of small layers and of experts, merges projections, and lets products of few rows use
        their kernels.

        Returns the number of replaced modules by kind; empty without kernels. The deterministic mode keeps
        transformers' experts, because it needs products with one order of summation.
        """
        if not self._options.fused or backend(self.device) != "triton":
            return {}
        replaced = fuse(self.model).summary()
        counts = {"merged": merge_projections(self.model), "experts": 0}
        if not self.deterministic:
            counts["experts"] = group_experts(self.model)
            use_few_rows_merged(self.model, self._few_rows)
            use_few_rows(self.model, self._few_rows)
        return counts | replaced

    def _check_quantized(self) -> None:
        """Compares the kernels of quantized weights with torch, on a GPU."""
        if self.device.type == "cuda":
            check_products(self.model)
            check_experts(self.model)

    def _attention_classes(self) -> list[AttentionClass]:
        """Returns the rank's query and KV heads for each layer class."""
        queries = query_spans(self.spec, self.collective.rank, self.collective.size)
        return [
            AttentionClass(
                own, part.heads, HeadMap(own, part.heads, shape.q_heads, shape.kv_heads, self.device)
            )
            for own, part, shape in zip(queries, self.shard.parts, self.spec.shapes, strict=True)
        ]

    def _use_attention_kernels(self, probe: ShapeProbe) -> bool:
        """Returns the result of `use_kernels` for this rank; `probe` has recorded every attention layer."""
        return use_kernels(
            self._options.attention,
            self.spec,
            [one.head_map for one in self._classes],
            self.device,
            self._options.dtype,
            self.kv_dtype,
            probe.params.values(),
        )

    @property
    def weights_bytes(self) -> int:
        """Bytes of the rank's parameters and buffers. A shared tensor counts once."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())

    @property
    def _hidden(self) -> int:
        """Elements of a token's hidden state."""
        return int(self.model.config.get_text_config().hidden_size)

    @property
    def recordable(self) -> bool:
        """Whether steps can be recorded as CUDA graphs, because the host makes no decision within a step."""
        fixed = self.attention_kernels and not self._in_parts and not self._ropes
        fixed = fixed and not computes_by_expert(self.model)
        return fixed and self.device.type == "cuda" and self.collective.recordable

    @property
    def _in_parts(self) -> bool:
        """Whether a step of a model with recurrent layers needs several model calls.

        This is the case if the recurrent modules are not registered, or if sums must not depend on other sequences.
        """
        return self.states is not None and (self._packed is None or self.deterministic)

    @property
    def recorded(self) -> bool:
        """Whether steps run as CUDA graphs."""
        return any(kind is not None and kind.recorded for kind in (self._graphs, self._mixed, self._pieces))

    def record(self, largest: int) -> None:
        """Records decode steps of up to `largest` requests if `recordable`, on all ranks of a group together."""
        limits = context_limits(self.req_to_token.max_tokens)
        self._record(DecodeGraphs, self._decode, batch_sizes(largest), limits)

    def record_chunks(self, chunk_tokens: int) -> None:
        """Records short prefill steps of up to `chunk_tokens` tokens if `recordable`, on all ranks together.

        Does nothing for models with recurrent layers: a recording cannot distinguish tokens of prompts and answers.
        """
        if self.states is not None:
            return
        limits = (self.req_to_token.max_tokens,)
        self._record(ChunkGraphs, self._chunk, chunk_sizes(chunk_tokens), limits)

    def record_pieces(self, chunk_tokens: int, decodes: int) -> None:
        """Records steps of up to `chunk_tokens` tokens as piecewise graphs, if `recordable`.

        A step may have up to `decodes` one-token sequences. These graphs are used for steps that fit no other
        recording. All ranks of a group record together.
        """
        if self._agreed(self.recordable and self.states is None):
            sizes, sequences = piece_sizes(chunk_tokens), decodes + SEQUENCES
            compute = partial(self._run, cache=None)
            self._pieces = PiecewiseGraphs(compute, sizes, sequences, self.spec.vocab_size, self.device)
            self._pieces.record(self._agreed)

    def record_mixed(self, sizes: Sequence[MixedSize]) -> None:
        """Records decode steps with chunks of prompts for each bucket, if `recordable`, on all ranks together. Does
        nothing for models with recurrent layers."""
        if sizes and self._agreed(self.recordable and self.states is None):
            trash_row, limits = self.req_to_token.trash_row, context_limits(self.req_to_token.max_tokens)
            compute = self._few_rows.wrapped(self._decode_and_chunks)
            self._mixed = MixedGraphs(compute, sizes, limits, trash_row, self.spec.vocab_size, self.device)
            self._mixed.record(self._agreed)

    def _record(
        self, kind: type[StepGraphs], compute: Compute, sizes: tuple[int, ...], limits: tuple[int, ...]
    ) -> None:
        if sizes and self._agreed(self.recordable):
            trash_row = self.req_to_token.trash_row
            compute = self._few_rows.wrapped(compute)
            self._graphs = kind(compute, sizes, limits, trash_row, self.spec.vocab_size, self.device)
            self._graphs.record(self._agreed)

    @contextmanager
    def eager(self) -> Iterator[None]:
        """Inside the block, no step uses CUDA graphs."""
        recorded = self._graphs, self._mixed, self._pieces
        self._graphs = self._mixed = self._pieces = None
        try:
            yield
        finally:
            self._graphs, self._mixed, self._pieces = recorded

    def resize(self, pool_tokens: int) -> None:
        """Frees the KV pool and allocates one of `pool_tokens` slots. Call this before any request has a row.

        The recurrent states keep their memory: their number does not depend on the KV pool.
        """
        unused = self.req_to_token.statistics().used_rows == 0 and self._graphs is None
        assert unused, "the KV pool cannot be replaced after a request has a row or steps are recorded"
        self.pages = whole_pages(pool_tokens, self.page_size)
        del self.pool
        self.pool = self._make_pool()

    def _make_pool(self) -> KVPool:
        slots = self.pages * self.page_size
        return make_pool(self.spec.layout, self.shard, slots, self.kv_dtype, self.device)

    def _rows(self) -> int:
        """Returns the number of rows: that of the options, or fewer if the states of so many requests do not fit on a
        rank of the group."""
        options = self._options
        if not (options.memory_bytes and self.spec.has_state):
            return options.rows
        left_bytes = options.memory_bytes - self.weights_bytes
        return least(self.collective, self.device, state_rows(options.rows, self._state_bytes, left_bytes))

    def _make_states(self) -> RowStates | None:
        """Returns the recurrent states by row; None for a model without recurrent layers.

        Raises ConfigError if the states do not fit the device's memory.
        """
        if not self._state_forms:
            return None
        requests = self.req_to_token.rows
        wanted, limit_bytes = self._options.cached_states(requests), self._options.cached_states_bytes
        cached = cached_states(self.spec, self._state_bytes, wanted, limit_bytes)
        slots = requests + 1 + cached  # one for the trash row
        try:
            states = MambaPool(self._state_forms, slots, self.device)
        except RuntimeError as exc:  # on a GPU torch.OutOfMemoryError, a subclass
            section, each = self._options.section, self._state_bytes
            or_cached = f" or {section}.cached_states ({cached})" if cached else ""
            raise ConfigError(
                f"recurrent states of {requests} requests and {cached} cached states do not fit {self.device}: "
                f"{slots} slots of {each:,} bytes are {slots * each:,} bytes; "
                f"lower {section}.max_requests ({requests}){or_cached}"
            ) from exc
        states.clear(self.req_to_token.trash_row)
        if self._packed is not None:
            self._packed.use(states)
        return RowStates(self.source.config, states)

    @property
    def _state_bytes(self) -> int:
        """Bytes of a request's recurrent state on this rank."""
        return self.spec.layout.state_bytes_of(self.collective.size)

    @property
    def transfer_pools(self) -> TransferPools:
        """The rank's KV pool and pool of recurrent states, which transfers read and write."""
        return TransferPools.of(self.pool, self.states.pool if self.states is not None else None)

    def copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies pages of the pool, given as (source, destination), with the result of copying one by one.

        Call this before the step's `forward`. The copies are queued on the current stream without synchronization.
        Raises ValueError if a number is not a page of the pool.
        """
        copy_in_order(self.pool, self.page_size, copies)

    def forward(
        self,
        batch: StepBatch,
        on_layer: LayerHook | None = None,
        scores: PromptScores | None = None,
        *,
        layerwise: bool = False,
    ) -> torch.Tensor:
        """Runs one step and returns the logits after each sequence's last token, float32 `[sequences, vocab]`.

        `on_layer(layer)` is called after the write of a layer's K and V (on a GPU: after the write is queued). With
        `layerwise`, the step is not launched as a whole, so that the hook is called between the layers; see
        `computes_by_layer`. All ranks of a group pass the same value. This method does not synchronize. The next step
        overwrites the logits. Raises ValueError for an empty batch, or a slice beyond the block table.

        `scores` of rank 0 receives the log-probabilities of the batch's `targets`.
        """
        if not batch.sequences:
            raise ValueError("a step needs at least one sequence")
        graphs = None if layerwise else self._graphs_of(batch)
        if graphs is not None:
            require_fits(batch, self.req_to_token)
            found = graphs.run(batch)
            if on_layer is not None:
                for layer in range(self.pool.layers):
                    on_layer(layer)
            return found
        if self.states is None or not self._in_parts:
            return self._forward(batch, on_layer, 1, None, scores)
        if self._packed is not None:
            return self._one_by_one(batch, on_layer, scores)
        logits: dict[int, torch.Tensor] = {}
        parts = recurrent_parts(batch, each_alone=self.deterministic)
        for number, part in enumerate(parts):
            ones = tuple(batch.sequences[index] for index in part)
            hook = (
                on_layer if number == len(parts) - 1 else None
            )  # the step's KV of a layer is complete only after the last part
            with self.states.of(ones) as cache:
                found = self._forward(StepBatch(ones), hook, len(ones), cache, scores)
            logits.update(zip(part, found, strict=True))
        return torch.stack([logits[index] for index in range(len(batch.sequences))])

    def computes_by_layer(self, batch: StepBatch) -> bool:
        """Returns whether a `layerwise` step computes each layer of all sequences before the next layer.

        Otherwise the step has several model calls, and layers of the first ones run before the hook's first call.
        """
        return not self._in_parts or len(batch.sequences) == 1

    def _graphs_of(self, batch: StepBatch) -> StepGraphs | None:
        """Returns the recorded steps if one of them can run the batch. With recurrent layers, they can run only
        batches of answer tokens."""
        if batch.scores:
            return None
        graphs = next(
            (one for one in (self._graphs, self._mixed) if one is not None and one.takes(batch)), None
        )
        return graphs if self.states is None or all(map(is_answer, batch.sequences)) else None

    def _one_by_one(
        self, batch: StepBatch, on_layer: LayerHook | None, scores: PromptScores | None
    ) -> torch.Tensor:
        """Computes each sequence in its own model call, so that sums do not depend on other sequences."""
        ones, last = [StepBatch((one,)) for one in batch.sequences], len(batch.sequences) - 1
        hooks = (on_layer if number == last else None for number in range(len(ones)))
        both = zip(ones, hooks, strict=True)
        return torch.cat([self._forward(one, hook, 1, None, scores) for one, hook in both])

    def _use_row_wise(self, dtype: torch.dtype) -> None:
        """Replaces linear layers by kernels with a fixed summation order. Enables `RowWise` if trial steps show other
        operations with sums.

        `RowWise` costs host time in every step, so other models run without it. Models with recurrent layers use
        neither: they compute each request alone, in fixed chunks.
        """
        require_same_bits(self.device, dtype)
        if recurrent_layers(self.model.config):
            return
        if backend(self.device) == "triton":
            use_linear_kernels(self.model)
            use_one_tile(self.model)
        self._row_wise = RowWise(self.spec.architecture)
        with without_other_ranks(self.model):
            for tokens in (1, 3):
                self._trial.logits(ShapeProbe(), None, tokens)
        found = dict(self._row_wise.replaced)
        if self.collective.rank == 0:
            log.info("deterministic", model=self.spec.architecture, row_by_row=found)
        if self.attention_kernels and not found:
            self._row_wise = None

    def keep_few_rows(self) -> bool:
        """Lets the last layer leave out the rows whose logits nobody reads, if a trial step shows that it can.

        Returns whether it does. Every rank of the group must call this after the same layers were fused."""
        if not keep_rows(self.model.base_model, self._kept):
            return False
        with without_other_ranks(self.model):
            same = self._trial.keeps_rows(self._kept, self._trial_cache)
        self._kept.enabled = self._agreed(same)
        return self._kept.enabled

    def _forward(
        self,
        batch: StepBatch,
        on_layer: LayerHook | None,
        rows: int,
        cache: StateCache | None,
        scores: PromptScores | None,
    ) -> torch.Tensor:
        index = build_index(
            batch, self.req_to_token, self.attention_kernels, apart=self.deterministic and self.states is None
        )
        if self._ropes:
            long = upload(long_tokens(batch, self.spec.rope_switch_tokens), self.device).bool()
            for rope in self._ropes:
                rope.long = long.view(rows, -1)
        if self._indexers:
            pool, layers = self.pool.parts[-1], self.spec.layout.spans[-1]
            step = index_step(batch, self.req_to_token, pool, layers.start, on_layer)
            for indexer in self._indexers:
                indexer.step = step
        if index.kernels is not None:
            context = self._kernel_step(index.kernels, index.slots, on_layer)
        else:
            context = self._context(
                lambda one, pool, hook, writes: PagedStep(pool, one.head_map, index, hook, writes), on_layer
            )
        ids, positions = index.input_ids.view(rows, -1), index.positions.view(rows, -1)
        if any(token < 0 for one in batch.sequences for token in one.tokens):
            ids = self.sampled.resolve(ids)
        if self._pieces is not None and not batch.scores and self._pieces.takes(batch):
            return self._pieces.run(ids, positions, index.last, context)
        recurrent = step_of(batch, self.device) if self._packed is not None else None
        scored = (scores or PromptScores()).of(batch, self.device) if batch.scores else None
        last = index.last if cache is None else 1
        return self._run(ids, positions, last, context, cache, recurrent, scored).float()

    def _decode(self, numbers: torch.Tensor, max_tokens: int) -> torch.Tensor:
        """Runs a step of one token per request, with inputs on the device only; see `graphs.Compute`."""
        ids, positions, rows = numbers.view(3, -1)
        slots = self.req_to_token.table[rows, positions].long()
        context = self._kernel_step(one_token_each(rows, positions), slots, max_tokens=max_tokens)
        step = decode_step(rows) if self._packed is not None else None
        with overlapping(len(rows), self._hidden) if self.collective.size == 1 else nullcontext():
            return self._run(self.sampled.resolve(ids)[None], positions[None], 0, context, None, step)

    def _decode_and_chunks(self, numbers: torch.Tensor, singles: int, max_tokens: int) -> torch.Tensor:
        """Runs a step of single tokens and chunks, with inputs on the device only; see `MixedGraphs`."""
        found = MixedNumbers.of(numbers, singles)
        slots = self.req_to_token.table[found.rows, found.positions].long()
        of_chunks = found.chunk_rows, found.firsts, found.starts, found.counts
        chunks = PackedQueries(*of_chunks, len(found.ids) - singles)
        index = KernelIndex(found.rows[:singles], found.positions[:singles] + 1, chunks)
        context = self._kernel_step(index, slots, max_tokens=max_tokens)
        ids = self.sampled.resolve(found.ids)
        return self._run(ids[None], found.positions[None], found.last, context, None)

    def _chunk(self, numbers: torch.Tensor, _: int) -> torch.Tensor:
        """Runs a step of several tokens per request, with inputs on the device only; see `graphs.ChunkGraphs`."""
        of_sequences = numbers[-5 * ChunkGraphs.SEQUENCES :]
        ids, positions, rows = numbers[: -len(of_sequences)].view(3, -1)
        own_rows, firsts, starts, counts, last = of_sequences.view(5, -1)
        slots = self.req_to_token.table[rows, positions].long()
        index = index_of_chunks(PackedQueries(own_rows, firsts, starts, counts, len(ids)))
        context = self._kernel_step(index, slots)
        return self._run(ids[None], positions[None], last, context, None)

    def _kernel_step(
        self,
        index: KernelIndex,
        slots: torch.Tensor,
        on_layer: LayerHook | None = None,
        max_tokens: int | None = None,
    ) -> StepAttention:
        def make(
            _: AttentionClass, pool: MHATokenToKVPool, hook: LayerHook | None, writes: bool
        ) -> StepAttention:
            table, deterministic = self.req_to_token, self.deterministic
            return KernelStep(pool, table, index, slots, hook, deterministic, writes, max_tokens)

        return self._context(make, on_layer)

    def _context(self, make: Make, on_layer: LayerHook | None) -> StepAttention:
        """Returns a step's attention context, which combines the contexts that `make` creates for each layer
        class."""

        def shared(one: AttentionClass, *rest: Any) -> StepAttention:
            own = make(one, *rest)
            return SharedHeads(own, one.queries, one.heads, self.collective) if self._whole_attention else own

        if not self.spec.places:
            return shared(self._classes[0], self.pool.parts[0], on_layer, True)
        return ClassedStep(shared, self._classes, self.pool.parts, self.spec.places, on_layer)

    def _run(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        last: torch.Tensor | int,
        context: AttentionContext,
        cache: StateCache | None,
        step: RecurrentStep | None = None,
        scored: ScoredTokens | None = None,
    ) -> torch.Tensor:
        """Returns the logits at `last`, in the model's type. The log-probabilities of `scored` are computed from the
        same pass, with the logits of a few positions at a time."""
        more: dict[str, Any] = {}
        recurrent: AbstractContextManager[None] = nullcontext()
        if self._packed is not None and step is not None:
            cache = make_cache(
                self.source.config
            )  # without states: records the current layer for `PoolLayers`
            recurrent = self._packed.during(step)
        if cache is not None:
            context = PoolLayers(context, cache, attention_layers(self.model.config))
            more[self._cache_name] = cache

        def logits_of(keep: torch.Tensor | int) -> torch.Tensor:
            output = self.model(
                input_ids=ids,
                position_ids=positions,
                use_cache=cache is not None,
                logits_to_keep=keep,
                paged_context=context,
                **more,
            )
            logits: torch.Tensor = output.logits.flatten(0, 1)
            return logits

        with torch.inference_mode(), self._row_wise or nullcontext(), recurrent:
            if scored is None:
                with self._kept.of(last, ids.numel()) as keep:
                    return logits_of(keep)
            with self._head.after_one_pass():
                logits = logits_of(last)
                for part in scored.parts(self.spec.vocab_size):
                    part.add(logits_of(part.index).float(), reads=self.collective.rank == 0)
            return logits

    @property
    def _trial(self) -> TrialSteps:
        return TrialSteps(self._run, self.spec.architecture, self.device)

    def _trial_cache(self) -> StateCache | None:
        """Returns a new cache for a trial step; None for a model that is not hybrid.

        A hybrid model without recurrent layers gets one too, which fails if a layer stores state."""
        config = self.model.config
        hybrid = recurrent_layers(config) or getattr(self.model, "_is_stateful", False)
        return make_cache(config) if hybrid else None

    def _probe(self, probe: ShapeProbe, split: RecurrentSplit) -> list[StateForm]:
        """Runs one token through this rank's part of the model, and completes `spec`; `probe` records the attention
        calls.

        Returns the forms of the rank's recurrent states; none for a model without recurrent layers.
        """
        forms: list[StateForm] = []
        config = self.model.config
        recurrent = recurrent_layers(config)
        cache = self._trial_cache()
        with without_other_ranks(self.model):
            logits = self._trial.logits(probe, cache)
            heads = [
                (shape.q_heads, shape.kv_heads)
                if self._whole_attention
                else (len(one.queries), len(one.heads))
                for one, shape in zip(self._classes, self.spec.shapes, strict=True)
            ]
            probe.require(self.spec, heads, config)
            if tuple(logits.shape) != (1, self.spec.vocab_size):
                raise UnsupportedModelError(
                    f"{self.spec.architecture} is not supported: logits of a token are {tuple(logits.shape)} "
                    f"for a vocabulary of {self.spec.vocab_size}"
                )
            scores = self._trial.head_runs_alone(self._head, self._trial_cache(), logits)
            self.spec = msgspec.structs.replace(self.spec, scores_prompts=scores)
            if cache is not None and recurrent:
                cache.require(self.spec.architecture, recurrent)
                forms = divided(cache.forms(), split.shares)
                layout = msgspec.structs.replace(self.spec.layout, states=state_classes(forms))
                self.spec = msgspec.structs.replace(self.spec, layout=layout)
                self._pack(cache)
        return forms

    def _pack(self, sample: StateCache) -> None:
        """Makes registered recurrent modules use the pool of states, and completes `spec`."""
        how = self._options.recurrent_kernels
        packed = PackedStates(backend(self.device) if how == "auto" else how, self.device)
        if pack_recurrent(self.model, [place for place, _ in sample.states()], packed):
            self._packed = packed
            differ = self.deterministic or bounds_prompts(self.model)
            self.spec = msgspec.structs.replace(self.spec, any_chunks=True, answers_differ=differ)
        else:
            whole = ignores_state(partial(self._trial.logits, ShapeProbe()), self.model.config)
            self.spec = msgspec.structs.replace(self.spec, whole_prompts=whole)
