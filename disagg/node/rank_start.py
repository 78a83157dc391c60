"""Steps of a rank's start that need torch and transformers: the model, the transport, the rank itself.

`disagg.node.host` calls them. It imports this module when a rank's process is created, so that the process of a
cluster, which knows ranks only as actors, loads neither package.
"""

from __future__ import annotations

import gc
import os
import socket
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import msgspec
import structlog
import torch

from disagg.core.config.read import Config, GroupConfig
from disagg.core.errors import ConfigError
from disagg.core.ports import Collective
from disagg.core.types import RankInfo
from disagg.model.load.source import ModelSource, make_source
from disagg.model.mixed_graphs import mixed_sizes
from disagg.model.runner import ModelRunner
from disagg.node.assemble import make_collective, make_runner, resolve_device
from disagg.node.group_storage import shares_host_cache
from disagg.node.host_memory import (
    HostCacheRoom,
    HostCacheSize,
    automatic_host_cache,
    available_bytes,
)
from disagg.node.local_prefill import local_prefill_tokens, tail_tokens
from disagg.node.prefix_caching import configured_host_cache, has_third_tier, repeats_pool
from disagg.node.rank import RankNode
from disagg.node.rank_records import Rendezvous, Started
from disagg.node.renewed_exchange import PageEndpoint
from disagg.node.sizing import (
    describe,
    describe_pool,
    fill_memory,
    pool_bytes,
    pool_tokens,
    state_bytes,
)
from disagg.node.swap import swap_bytes
from disagg.node.warm import warm_model, warm_page_copies, warm_sampling
from transport.base import Transport
from transport.control.zmq import make_control
from transport.hosts import own_host
from transport.inproc import InprocFabric
from transport.keys.ring import KeyRing
from transport.reach import Choice, choose
from transport.select import TLSOptions, make_transport

log = structlog.get_logger(__name__)


class RankPlace(NamedTuple):
    """A rank's number in its group, and the group's name."""

    rank: int
    group: str


class RankModel(NamedTuple):
    """The model of a rank before its weights are loaded."""

    config: Config
    group: GroupConfig
    device: torch.device
    source: ModelSource
    fingerprint: Future[str]
    """`ModelSource.fingerprint`, computed in a thread while the weights load from the same files."""

    def group_of(self, runner: ModelRunner) -> GroupConfig:
        """Returns the group's section with the number of requests for which a loaded runner has room."""
        return self.group.with_requests(runner.req_to_token.rows)

    def collective(self, rank: int, rendezvous: Rendezvous) -> Collective:
        """Returns the group's collective; see `make_collective`."""
        return make_collective(rank, self.group.ranks, rendezvous, self.config.model.deterministic)


def freeze_objects() -> None:
    """Excludes every current object from garbage collection: a full collection would stop all threads for 0.2 s.

    Call this function only in a process that runs one rank, where libraries and the model exist until the process
    ends.
    """
    gc.collect()
    gc.freeze()


def begin_model(config: Config, group: GroupConfig) -> RankModel:
    """Selects the rank's device and starts to compute the model's fingerprint. Raises `ConfigError`."""
    device = resolve_device(group.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    source = make_source(config)
    hashing = ThreadPoolExecutor(1, "weights-hash")
    fingerprint = hashing.submit(lambda: source.fingerprint)
    hashing.shutdown(wait=False)
    return RankModel(config, group, device, source, fingerprint)


def load_runner(model: RankModel, collective: Collective, rank: int, role: str) -> tuple[ModelRunner, str]:
    """Loads the weights; on a GPU also sizes the KV pool, warms kernels and records CUDA graphs.

    Returns the runner, and the use of the device's memory as text.
    """
    config, device = model.config, model.device
    runner = make_runner(config, model.group, model.source, collective, device)
    group = model.group_of(runner)
    memory = ""
    if device.type == "cuda":
        if group.pool_tokens == 0:
            memory = describe(fill_memory(runner, config, group, role))
        warm_model(runner, group.chunk_tokens, group.decode_batch or group.max_requests)
        if role == "decode":
            warm_page_copies(runner)
        if rank == 0:
            warm_sampling(runner.spec.vocab_size, device)
        if group.graphs:
            _record(config, runner, group, role)
    return runner, f"{describe_pool(runner)}; {memory}" if memory else describe_pool(runner)


def _record(config: Config, runner: ModelRunner, group: GroupConfig, role: str) -> None:
    """Records the CUDA graphs of the group's steps."""
    if group.decode_batch:
        runner.record(group.decode_batch)
    else:
        runner.record_chunks(group.chunk_tokens)
    if role != "decode":
        runner.record_pieces(group.chunk_tokens, group.decode_batch)
    elif step_tokens := local_prefill_tokens(config, group, runner):
        runner.record_mixed(mixed_sizes(step_tokens, group.decode_batch))
        tail = tail_tokens(config, group, runner) if config.router.split_prompt_tokens else 0
        if tail:  # tails of prompts that both groups compute
            runner.record_pieces(tail, 0)


def with_host_cache(
    model: RankModel, runner: ModelRunner, host_ranks: int
) -> tuple[RankModel, HostCacheSize]:
    """Returns the model with `host_cache_bytes` of its group resolved, and that size with its reason.

    `host_ranks`: number of ranks that start together on this host. Raises `ConfigError` if the group has a third tier
    and the host has no memory for the second one.
    """
    group, device = model.group, model.device
    deterministic, on_gpu = model.config.model.deterministic, device.type == "cuda"
    size = configured_host_cache(group, runner.spec, deterministic, on_gpu=on_gpu)
    if size is None:
        pool = pool_bytes(runner) + state_bytes(runner)
        swap = swap_bytes(group, device)
        room = HostCacheRoom(available_bytes(), host_ranks, pool, swap)
        size = automatic_host_cache(room, repeats_pool=repeats_pool(group))
        if not size.nbytes and has_third_tier(group):
            lower = f", or lower {group.role}.swap_bytes" if swap else ""
            setting = "storage" if group.storage else "host_cache_shared"
            raise ConfigError(
                f"{group.role}.{setting} needs host memory, and none is left ({size.reason}): set "
                f"{group.role}.host_cache_bytes{lower}"
            )
    resolved = msgspec.structs.replace(group, host_cache_bytes=size.nbytes)
    return model._replace(group=resolved), size


def make_node(
    rank_class: type[RankNode[Any, Any, Any]],
    runner: ModelRunner,
    model: RankModel,
    keys: KeyRing,
    place: RankPlace,
) -> tuple[RankNode[Any, Any, Any], Choice]:
    """Returns the rank and the choice of its transport. The caller starts and stops the rank."""
    config = model.config
    choice = _choose_transport(config, rank_class.role, place.rank)
    node = rank_class(
        rank=place.rank,
        config=_with_checksum(config, choice.name),
        group_config=model.group_of(runner),
        name=place.group,
        runner=runner,
        control=make_control(config.control, keys),
        transport=_make_transport(choice, config, keys, place.group, model.device),
    )
    if shares_host_cache(model.group, runner.spec):
        share_pages(node, config, keys, place)
    return node, choice


def pinned_size(host_cache: HostCacheSize, node: RankNode[Any, Any, Any]) -> HostCacheSize:
    """Returns the size of the second tier, which is smaller than chosen if the host could not pin all of it."""
    controller = node.cache_controller
    if controller.counts == controller.wanted:
        return host_cache
    return HostCacheSize(controller.pinned_bytes, f"{host_cache.reason}; as much as the host could pin")


def share_pages(node: RankNode[Any, Any, Any], config: Config, keys: KeyRing, place: RankPlace) -> None:
    """Opens the endpoint at which the rank shares its host memory with other groups."""
    pages = choose(config.transport, own_host(config.control.host))
    name = f"{place.group}-{place.rank}-pages"
    open_pages = partial(_make_transport, pages, config, keys, name, torch.device("cpu"))
    node.share_host_cache(PageEndpoint(open_pages, pages.name))
    if place.rank == 0:
        log.info("host_cache_shared", group=place.group, transport=pages.name, because=pages.reason)


def started_rank(
    info: RankInfo,
    runner: ModelRunner,
    model: RankModel,
    memory: str,
    choice: Choice,
    host_cache: HostCacheSize,
) -> Started:
    """Returns the description of a started rank. Blocks until the model's fingerprint is computed."""
    host, tokens = socket.gethostname(), pool_tokens(runner)
    return Started(
        info,
        runner.spec,
        model.fingerprint.result(),
        os.getpid(),
        host,
        memory,
        choice.name,
        tokens,
        runner.req_to_token.rows,
        host_cache,
    )


def _choose_transport(config: Config, role: str, rank: int) -> Choice:
    if role == "colocated":
        return Choice("inproc", "a colocated group sends no KV")
    choice = choose(config.transport, own_host(config.control.host))
    if rank == 0:
        log.info("transport_chosen", transport=choice.name, because=choice.reason)
    return choice


def _make_transport(
    choice: Choice, config: Config, keys: KeyRing, group: str, device: torch.device
) -> Transport:
    return make_transport(
        choice.backend,
        rank_name=group,
        fabric=InprocFabric() if choice.backend == "inproc" else None,
        gpu=device.type == "cuda",
        reach=choice.reach,
        interface=choice.interface,
        tls=TLSOptions(keys, own_host(config.control.host), config.transport.tls_lanes),
    )


def _with_checksum(config: Config, transport: str) -> Config:
    """Returns the configuration with `transfer.checksum` resolved for the transport."""
    transfer = msgspec.structs.replace(config.transfer, checksum=config.transfer.checks(transport))
    return msgspec.structs.replace(config, transfer=transfer)
