"""A rank in a process of its own, in steps that a cluster can order: what the Ray actors are thin shells over."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
from typing import Any, ClassVar, NamedTuple

import structlog
import torch

from disagg.core.config import Config, GroupConfig
from disagg.core.folders import private_folder
from disagg.core.log import configure
from disagg.core.ports import Collective
from disagg.core.timeline import TimelineSpan
from disagg.core.types import GroupInfo, RankInfo
from disagg.model.spec import ModelSpec
from disagg.node.assemble import Rendezvous, make_collective, make_runner, make_source, resolve_device
from disagg.node.rank import SWITCH_INTERVAL_S, RankNode
from disagg.node.sizing import describe, describe_pool, fill_memory
from disagg.node.warm import warm_model, warm_page_copies
from disagg.sockets.guards import log_own_sockets
from transport.base import Transport
from transport.control_zmq import make_control
from transport.hosts import own_host
from transport.inproc import InprocFabric
from transport.key_ring import AnyKeys, as_ring
from transport.keys import KeySet
from transport.reach import Choice, choose
from transport.select import make_transport

log = structlog.get_logger(__name__)


class Started(NamedTuple):
    """What a rank says when its model is loaded and its channels are open."""

    info: RankInfo
    spec: ModelSpec
    pid: int
    host: str
    """Where `pid` means something."""
    memory: str
    """The KV pool, and what else takes the device's memory, in words."""
    transport: str
    """`Choice.name` of the rank's transport."""


class RankHost:
    """Owns one `RankNode`. Called in this order: `rendezvous` (rank 0), `start`, `join`, `link`, `stop`."""

    node_class: ClassVar[type[RankNode[Any, Any]]]

    def __init__(self, rank: int, config: Config, keys: AnyKeys, name: str = "") -> None:
        """`name` is the group's; its role when left out."""
        configure(config.log)
        self._rank, self._config, self._keys, self._name = rank, config, as_ring(keys), name
        self._node: RankNode[Any, Any] | None = None
        self._collective: Collective | None = None
        self._meeting_folder = ""
        self._over = threading.Event()

    @property
    def group_config(self) -> GroupConfig:
        """The part of the configuration that is about this rank's group."""
        found: GroupConfig = getattr(self._config, self.node_class.role)
        return found

    def rendezvous(self, backend: str) -> Rendezvous:
        """Where the group's ranks shall meet: a folder of this user, which `start` or `stop` removes."""
        if self.group_config.ranks > 1:
            self._meeting_folder = str(private_folder("ranks"))
        return Rendezvous(self._meeting_folder, backend)

    def start(self, rendezvous: Rendezvous) -> Started:
        """Meets the other ranks, loads the model, opens the channels. Raises `DisaggError`."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        group = self.group_config
        device = resolve_device(group.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        source = make_source(self._config)
        self._collective = make_collective(
            self._rank, group.ranks, rendezvous, self._config.model.deterministic
        )
        if rendezvous.backend == "shared":  # NCCL may read its store later
            self._remove_meeting_folder()
        runner = make_runner(self._config, group, source, self._collective, device)
        memory = ""
        if device.type == "cuda":
            if group.pool_tokens == 0:
                memory = describe(fill_memory(runner, self._config, group, self.node_class.role))
            warm_model(runner, group.chunk_tokens, min(group.max_batch, group.max_requests))
            if self.node_class.role == "decode":
                warm_page_copies(runner)
            if group.graphs and self.node_class.role == "prefill":
                runner.record_chunks(group.chunk_tokens)
            elif group.graphs:
                runner.record(min(group.max_batch, group.max_requests))
        choice = self._choose_transport()
        self._node = self.node_class(
            rank=self._rank,
            config=self._config,
            group_config=group,
            name=self._name,
            runner=runner,
            control=make_control(self._config.control, self._keys),
            transport=self._make_transport(choice, device),
        )
        self._node.on_broken = self._over.set
        memory = f"{describe_pool(runner)}; {memory}" if memory else describe_pool(runner)
        info, host = self._node.start(), socket.gethostname()
        log_own_sockets(descendants=False)
        return Started(info, runner.spec, os.getpid(), host, memory, choice.name)

    def join(self, group: GroupInfo) -> None:
        """All ranks of the group have started."""
        self._running().join(group)

    def link(self, other: GroupInfo) -> None:
        """Connects to a group of the other kind."""
        self._running().link(other)

    def update_keys(self, keys: KeySet) -> None:
        """The cluster's keys have changed; the rank's channel follows."""
        self._keys.replace(keys)

    def peer_lost(self, address: str) -> None:
        """The cluster saw a peer die, maybe before its silence was noticed."""
        self._running().peer_lost(address)

    def spans(self) -> list[TimelineSpan]:
        """What happened since the last call."""
        return self._running().spans()

    def statistics(self) -> dict[str, Any]:
        """Statistics of every structure of the rank."""
        return self._running().statistics()

    def check(self) -> None:
        """Raises `InvariantError` when a structure of the rank finds its books wrong."""
        self._running().check()

    def park(self) -> None:
        """Returns when the rank stops, or cannot go on; who waits for it learns at once, as of a process's end."""
        self._over.wait()

    def stop(self, drain_timeout_s: float) -> None:
        """Ends requests, threads and connections. Again, or before `start`: nothing happens."""
        if self._node is not None:
            self._node.stop(drain_timeout_s)
        if self._collective is not None:
            self._collective.close()
        self._remove_meeting_folder()
        self._over.set()

    def _choose_transport(self) -> Choice:
        if self.node_class.role == "colocated":
            return Choice("inproc", "a colocated group sends no KV")
        choice = choose(self._config.transport, own_host(self._config.control.host))
        if self._rank == 0:
            log.info("transport_chosen", transport=choice.name, because=choice.reason)
        return choice

    def _make_transport(self, choice: Choice, device: torch.device) -> Transport:
        return make_transport(
            choice.backend,
            rank_name=self._name,
            fabric=InprocFabric() if choice.backend == "inproc" else None,
            gpu=device.type == "cuda",
            reach=choice.reach,
            interface=choice.interface,
            host=own_host(self._config.control.host),
            keys=self._keys,
            tls_lanes=self._config.transport.tls_lanes,
        )

    def _remove_meeting_folder(self) -> None:
        if self._meeting_folder:
            shutil.rmtree(self._meeting_folder, ignore_errors=True)
            self._meeting_folder = ""

    def _running(self) -> RankNode[Any, Any]:
        assert self._node is not None, "a rank is used after start"
        return self._node
