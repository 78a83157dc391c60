"""What `disagg.vllm` reads from vLLM's objects, and its imports of vLLM: all that may differ between versions.

Written for the interface of vLLM 0.26 (`KVConnectorBase_V1`), with what 0.32 adds for several KV cache groups.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from disagg.core.errors import ConfigError
from disagg.core.types import Span
from disagg.vllm.groups import BlockTables, CacheGroup, is_plain
from disagg.vllm.received import NewlyReceived
from disagg.vllm.specs import cache_groups

BASE_MODULE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_COMPUTED = ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED")
"""Final statuses of a request whose prompt is computed."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine of vLLM, as the connector needs to know it."""

    engine_id: str
    produces: bool
    consumes: bool
    tp_size: int
    dp_rank: int
    kv_heads: int
    """KV heads of the whole model; 1 for a latent cache (MLA)."""
    blocks: int
    """Blocks of the KV cache, which all groups share."""
    groups: tuple[CacheGroup, ...]
    """KV cache groups, in the order of the block tables."""
    fingerprint: str
    """Names of the model and of the cache's element type, and the groups, which both engines must have."""
    async_scheduling: bool
    """Whether vLLM schedules a step before the previous one has ended."""
    extra: dict[str, Any]
    """`kv_connector_extra_config`."""
    steps_alone: bool = True
    """Whether no other engine waits for this engine's steps, as data-parallel engines of a MoE do."""
    fails_loads: bool = False
    """Whether vLLM fails requests whose KV did not come (`kv_load_failure_policy`), rather than compute them."""
    whole_blocks: bool = False
    """Whether only the attention kernels know the order of elements in a block, as on a CPU."""

    @property
    def local(self) -> bool:
        """Whether vLLM frees blocks of running requests, because of windows, chunks or recurrent layers."""
        return any(group.local for group in self.groups)

    @property
    def early_refused(self) -> str:
        """Why requests may not be reported before all KV has come; empty if they may. See docs/vllm.md."""
        conditions = {
            'kv_role must be "kv_consumer"': self.consumes and not self.produces,
            'kv_load_failure_policy must be "fail"': self.fails_loads,
            "data_parallel_size must be 1": self.steps_alone,
            "the model must have one KV cache group, of full attention": is_plain(self.groups),
        }
        return "; ".join(condition for condition, holds in conditions.items() if not holds)

    @property
    def attention(self) -> tuple[CacheGroup, ...]:
        """The groups whose blocks hold KV of tokens: the page tables of the data path, in this order."""
        return tuple(group for group in self.groups if group.recurrent is None)

    @property
    def page_sizes(self) -> tuple[int, ...]:
        """Positions of the data path in a block of each page table: a block that is moved as a whole is one."""
        return tuple(1 if self.whole_blocks else group.block_size for group in self.attention)

    def positions(self, tokens: Span) -> Span:
        """Returns the positions of the data path that hold `tokens`."""
        size = self.attention[0].block_size if self.whole_blocks else 1
        return Span(tokens.start // size, -(-tokens.stop // size))

    def handed_over(self, prompt_tokens: int) -> int:
        """Returns how many tokens of a prompt are computed by the producer.

        The consumer computes the prompt's last token again. With a sliding window, this token may attend to one token
        that vLLM has freed when the whole prompt is computed, and a recurrent layer needs the state before this
        token; the producer therefore computes one token less.
        """
        return max(0, prompt_tokens - 1) if self.local else prompt_tokens

    def starts(self, tokens: Span, of_classes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `Ticket.starts` for a consumer that needs `tokens`. `of_classes`: page table of each class."""
        if not self.local:
            return ()
        needed = [max(tokens.start, group.first_needed(tokens.stop)) for group in self.attention]
        return tuple(self.positions(Span(needed[group], tokens.stop)).start for group in of_classes)

    def kept(self, tables: BlockTables, tokens: int) -> BlockTables:
        """Returns a request's block tables as vLLM has them when `tokens` are computed; see `CacheGroup.kept`."""
        return tuple(group.kept(blocks, tokens) for group, blocks in zip(self.groups, tables, strict=True))

    def page_tables(self, tables: BlockTables) -> BlockTables:
        """Returns those of a request's block tables that are page tables of the data path; see `attention`."""
        pairs = zip(self.groups, tables, strict=True)
        return tuple(blocks for group, blocks in pairs if group.recurrent is None)

    def state_blocks(self, tables: BlockTables, tokens: int) -> tuple[int, ...]:
        """Returns the block of each group of recurrent layers that has the state after `tokens`."""
        pairs = zip(self.groups, tables, strict=True)
        return tuple(
            group.state_block(blocks, tokens) for group, blocks in pairs if group.recurrent is not None
        )


@dataclass(frozen=True, slots=True)
class ScheduledTokens:
    """One request's part of a step."""

    request_id: str
    tables: BlockTables
    """Blocks of each group; empty if the step adds none."""
    replaces: bool
    """Whether `tables` are all blocks of the request; otherwise they follow the earlier ones."""
    computed: int
    """Tokens computed before the step."""
    tokens: int
    """Tokens that the step computes."""


def base_classes() -> tuple[type, ...]:
    """Imports vLLM and returns the base classes of connectors.

    With `SupportsHMA`, vLLM makes several KV cache groups. Versions without `KVConnectorTransferResults` cannot be
    told which request's KV did not come if there are several groups; there, vLLM keeps one group.
    """
    base = importlib.import_module(BASE_MODULE)
    several = hasattr(base, "SupportsHMA") and reports_failed_requests()
    return (base.KVConnectorBase_V1, base.SupportsHMA) if several else (base.KVConnectorBase_V1,)


def reports_failed_requests() -> bool:
    """Returns whether this vLLM can be told which request's KV did not come."""
    return hasattr(importlib.import_module(BASE_MODULE), "KVConnectorTransferResults")


def transfer_results(sent: set[str] | None, received: set[str] | None, failed: set[str]) -> Any:
    """Returns the requests in vLLM's type: those of `get_finished`, and those whose KV did not come."""
    results = importlib.import_module(BASE_MODULE).KVConnectorTransferResults
    return results(finished_sending=sent or set(), finished_recving=received or set(), failed_recving=failed)


def tensor_parallel_rank() -> int:
    """Returns this worker's rank in its tensor-parallel group."""
    return int(importlib.import_module("vllm.distributed.parallel_state").get_tensor_model_parallel_rank())


def is_scheduler(role: Any) -> bool:
    """Returns whether a `KVConnectorRole` is that of the scheduler."""
    return str(role.name) == "SCHEDULER"


def facts_of(vllm_config: Any, kv_cache_config: Any) -> EngineFacts:
    """Returns the facts of an engine. Raises ConfigError for an engine that the connector does not support."""
    transfer, parallel, model = (
        vllm_config.kv_transfer_config,
        vllm_config.parallel_config,
        vllm_config.model_config,
    )
    if parallel.pipeline_parallel_size != 1:
        raise ConfigError(
            f"pipeline_parallel_size is {parallel.pipeline_parallel_size}; DisaggConnector supports 1 only"
        )
    latent = bool(getattr(model, "use_mla", False))
    dtype = vllm_config.cache_config.cache_dtype
    whole_blocks = vllm_config.device_config.device_type == "cpu"
    groups = cache_groups(kv_cache_config.kv_cache_groups, whole_blocks, _head_groups(model))
    if any(group.recurrent for group in groups) and getattr(vllm_config.cache_config, "use_replayssm", False):
        raise ConfigError(
            "DisaggConnector does not move the inputs that ReplaySSM keeps: start vLLM without --use-replayssm"
        )
    plain = is_plain(groups)
    if not plain and not reports_failed_requests():
        raise ConfigError(
            "all layers of the model have sliding windows, or some are recurrent, and this version of vLLM cannot be "
            "told which request's KV did not come; DisaggConnector needs a version with KVConnectorTransferResults "
            "for this model"
        )
    known = f"{model.model} {model.dtype if dtype == 'auto' else dtype}"
    return EngineFacts(
        engine_id=str(transfer.engine_id),
        produces=bool(transfer.is_kv_producer),
        consumes=bool(transfer.is_kv_consumer),
        tp_size=parallel.tensor_parallel_size,
        dp_rank=getattr(parallel, "data_parallel_index", 0),
        kv_heads=1 if latent else model.get_total_num_kv_heads(),
        blocks=kv_cache_config.num_blocks,
        groups=groups,
        fingerprint=known if plain else " | ".join([known, *(group.describe() for group in groups)]),
        async_scheduling=bool(getattr(vllm_config.scheduler_config, "async_scheduling", False)),
        extra=dict(transfer.kv_connector_extra_config or {}),
        steps_alone=getattr(parallel, "data_parallel_size", 1) == 1,
        fails_loads=getattr(transfer, "kv_load_failure_policy", "fail") == "fail",
        whole_blocks=whole_blocks,
    )


def _head_groups(model: Any) -> int:
    """Returns the groups of a Mamba-2 layer's heads in the model's configuration; 0 if it names none."""
    config = getattr(model, "hf_text_config", None)
    names = ("mamba_n_groups", "n_groups", "mamba_ngroups")
    return next((int(getattr(config, name)) for name in names if getattr(config, name, None)), 0)


def computes_nothing(output: Any) -> bool:
    """Returns whether a `SchedulerOutput` is that of a step without tokens."""
    return not output.num_scheduled_tokens


def preempted(output: Any) -> set[str]:
    """Returns the requests that vLLM has preempted for the step of a `SchedulerOutput`."""
    return set(getattr(output, "preempted_req_ids", None) or ())


def newly_received(output: Any) -> set[str]:
    """Returns the requests whose KV has come by now, if the worker of a `KVConnectorOutput` runs in this process."""
    found = getattr(output, "kv_connector_worker_meta", None)
    return found.take() if isinstance(found, NewlyReceived) else set()


def scheduled(output: Any) -> Iterator[ScheduledTokens]:
    """Yields each request of a `SchedulerOutput`."""
    counts = output.num_scheduled_tokens
    for new in output.scheduled_new_reqs:
        tables = tables_of(new.block_ids)
        yield ScheduledTokens(new.req_id, tables, True, new.num_computed_tokens, counts[new.req_id])
    cached = output.scheduled_cached_reqs
    for index, request_id in enumerate(cached.req_ids):
        tables = tables_of(cached.new_block_ids[index] or ())
        resumed = request_id in cached.resumed_req_ids
        yield ScheduledTokens(
            request_id, tables, resumed, cached.num_computed_tokens[index], counts[request_id]
        )


def block_tables_of(blocks: Any) -> BlockTables:
    """Returns all block ids of a request's `KVCacheBlocks`, shared ones included."""
    return tables_of(blocks.get_block_ids())


def tables_of(block_ids: Sequence[Any]) -> BlockTables:
    """Returns the block ids of each KV cache group; vLLM passes a tuple of lists, or the list of the only group."""
    return tuple(map(list, block_ids)) if isinstance(block_ids, tuple) else (list(block_ids),)


def prompt_is_computed(request: Any) -> bool:
    """Returns whether a finished request has its whole prompt in the KV cache."""
    return request.status.name in _COMPUTED


def drop_last_prompt_token(request: Any) -> None:
    """Shortens the prompt of a waiting request by one token, as vLLM's NixlConnector does for recurrent models.

    The request's answer is then of no use, and ends with its first token: the KV of further ones would be cached for
    the tokens of the whole prompt, whose hashes vLLM has computed. A prompt of one token, one without token ids or
    with embeddings, and one whose log-probabilities are asked for stay as they are.
    """
    tokens, own = request.prompt_token_ids, vars(request)["_all_token_ids"]
    asked = getattr(request, "skip_reading_prefix_cache", False)
    embedded = getattr(request, "prompt_embeds", None) is not None
    if tokens and not asked and not embedded and len(tokens) == len(own) == request.num_prompt_tokens > 1:
        request.prompt_token_ids = tokens[:-1]  # a copy: vLLM's frontend may have the same list
        del own[-1:]
        request.num_prompt_tokens -= 1
        request.max_tokens = 1


def answers_one_token(request: Any) -> bool:
    """Returns whether the request ends with the step that computes its prompt."""
    return bool(request.max_tokens == 1)
