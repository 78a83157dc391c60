"""Two NIXL ranks (NVIDIA Inference Xfer Library, https://github.com/ai-dynamo/nixl): a pool of noise and an
agent.

NIXL brings its own UCX, which must not share a process with this project's: this module must not import
`ucxx`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from disagg.bench.common.noise import NoisyPool
from disagg.bench.nixl import descriptors
from disagg.bench.nixl.descriptors import Array, PoolMemory
from disagg.core.errors import ConfigError, TransportError
from disagg.core.types import KVLayout, Shard, Span
from disagg.kv.pages import slots_of
from disagg.kv.pool import MHATokenToKVPool

WAYS = ("prepared", "built")
"""Sources of a request's descriptors: chosen from lists prepared for all pages, or built for the request."""


def load() -> ModuleType:
    """Returns NIXL's Python module. Raises `ConfigError` when the module cannot be imported."""
    # By default, NIXL and UCX log to standard output, which --json uses for the report.
    os.environ.setdefault("NIXL_LOG_LEVEL", "WARN")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    try:
        import nixl
    except (ImportError, OSError) as exc:
        raise ConfigError(
            f"--peer nixl needs NIXL, which cannot be imported ({exc}); install it with `pip install nixl`, "
            "or leave --peer out"
        ) from exc
    return nixl  # type: ignore[no-any-return]


@dataclass(frozen=True)
class NixlOptions:
    """Settings of a rank and of the request it moves."""

    name: str
    shard: Shard
    part: Shard
    """The layers and heads that both ranks hold, and that the transfer moves."""
    layout: KVLayout
    page_size: int
    pool_slots: int
    pages: tuple[int, ...]
    """Pages of the request."""
    tokens: int
    threads: int
    """Number of threads with which NIXL posts descriptors."""
    cuda: bool


@dataclass(frozen=True)
class PeerInfo:
    """Data that a rank needs from its peer."""

    metadata: bytes
    """Opaque metadata of NIXL."""
    memory: PoolMemory
    page_size: int
    slots: Array
    """Slots of the request, `[tokens]`."""


@dataclass(frozen=True)
class NixlTransfer:
    """Times of one transfer."""

    descriptors_s: float
    """Time to create the descriptors and NIXL's transfer handle."""
    transfer_s: float
    """Time from posting the transfer until the source detected the completion of all writes."""
    descriptors: int


class NixlProbe:
    """A process that tests whether NIXL can be imported."""

    def check(self) -> None:
        """Raises `ConfigError` when NIXL cannot be imported."""
        load()

    def close(self) -> None:
        """Does nothing: the probe has no resources."""


class NixlRank:
    """One of the two ranks. The source uses `connect`, `fill` and `move`; the destination uses `info`, `poison` and
    `check`."""

    def __init__(self, options: NixlOptions) -> None:
        nixl = load()
        self._options, self._shard, self._part = options, options.shard, options.part
        self._device = torch.device("cuda", 0) if options.cuda else torch.device("cpu")
        if options.cuda:
            torch.cuda.set_device(self._device)
        self._pool = MHATokenToKVPool(
            len(self._shard.layers),
            options.pool_slots,
            len(self._shard.heads),
            options.layout.head_dim,
            getattr(torch, options.layout.dtype),
            self._device,
        )
        self._noisy = NoisyPool(self._pool, self._shard, options.layout, self._part)
        self._slots = slots_of(options.pages, options.page_size, Span(0, options.tokens)).long()
        self._kind = "VRAM" if options.cuda else "DRAM"
        self._agent: Any = nixl.nixl_agent(
            options.name, nixl.nixl_agent_config(backends=["UCX"], num_threads=options.threads)
        )
        self._registered = self._agent.register_memory(self._pool.buffer)
        self._ways: dict[str, Callable[[], tuple[Any, int]]] = {}

    def info(self) -> PeerInfo:
        """Returns the data for the peer's `connect`."""
        options = self._options
        memory = PoolMemory(
            self._pool.buffer.data_ptr(),
            options.pool_slots,
            options.layout.head_bytes,
            options.layout.planes,
            self._shard,
        )
        slots = self._slots.numpy()
        return PeerInfo(self._agent.get_agent_metadata(), memory, options.page_size, slots)

    def connect(self, peer: PeerInfo) -> None:
        """Connects to the destination; prepares the lists of all pages of both pools."""
        mine = self.info()
        memories, slots = (mine.memory, peer.memory), (mine.slots, peer.slots)
        sizes = (mine.page_size, peer.page_size)
        name = self._agent.add_remote_agent(peer.metadata)
        unit = descriptors.unit_tokens(memories, self._part, sizes, self._options.tokens)
        lists = [
            self._agent.prep_xfer_dlist(
                owner, descriptors.prepared(memory, self._part, unit), self._kind, ["UCX"]
            )
            for owner, memory in zip(("NIXL_INIT_AGENT", name), memories, strict=True)
        ]

        def choose() -> tuple[Any, int]:
            first, second = (
                descriptors.chosen(memory, self._part, side, unit)
                for memory, side in zip(memories, slots, strict=True)
            )
            return self._agent.make_prepped_xfer("WRITE", lists[0], first, lists[1], second), len(first)

        def build() -> tuple[Any, int]:
            both = descriptors.built(memories, self._part, slots)
            ready = [self._agent.get_xfer_descs(side, self._kind) for side in both]
            return self._agent.initialize_xfer("WRITE", *ready, name), len(both[0])

        self._ways = dict(zip(WAYS, (choose, build), strict=True))

    def fill(self) -> None:
        """Fills the request's slots with noise."""
        self._noisy.fill(0, self._slots.to(self._device))
        self._settle()

    def poison(self) -> None:
        """Overwrites the whole pool with poison before a transfer."""
        self._pool.poison()
        self._settle()

    def move(self, way: str) -> NixlTransfer:
        """Moves the request once. Raises `TransportError` when NIXL reports a failure."""
        started_s = time.perf_counter()
        handle, count = self._ways[way]()
        ready_s = time.perf_counter()
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        ended_s = time.perf_counter()
        if state != "DONE":
            raise TransportError(f"NIXL ended a transfer of {count} descriptors with {state}")
        handle.release()
        return NixlTransfer(ready_s - started_s, ended_s - ready_s, count)

    def check(self) -> None:
        """Raises `InvariantError` unless the pool holds the source's noise and nothing else."""
        self._noisy.take(0, self._slots.to(self._device))
        self._noisy.check_untouched()
        self._settle()

    def close(self) -> None:
        """Deregisters the pool from the agent."""
        self._agent.deregister_memory(self._registered)

    def _settle(self) -> None:
        if self._options.cuda:
            torch.cuda.synchronize(self._device)
