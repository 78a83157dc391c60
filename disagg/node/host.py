"""One rank in its own process, started and stopped in steps by a cluster. Ray actors only wrap `RankHost`."""

from __future__ import annotations

import gc
import os
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, NamedTuple

import msgspec
import structlog
import torch

from disagg.core.config.read import Config, GroupConfig
from disagg.core.folders import private_folder
from disagg.core.log import configure
from disagg.core.ports import Clock, Collective
from disagg.core.timeline import TimelineSpan
from disagg.core.types import GroupInfo, RankInfo
from disagg.model.spec.model_spec import ModelSpec
from disagg.node.assemble import Rendezvous, make_collective, make_runner, make_source, resolve_device
from disagg.node.ownership import DISOWNED, NO_COUNTS, NO_OWNER, GroupCounts, Owner, Ownership
from disagg.node.process import ProcessIdentity, die_with_parent
from disagg.node.rank import SWITCH_INTERVAL_S, RankNode
from disagg.node.sizing import describe, describe_pool, fill_memory, pool_tokens
from disagg.node.warm import warm_model, warm_page_copies, warm_sampling
from disagg.sockets.guards import log_own_sockets
from transport.base import Transport
from transport.control.zmq import make_control
from transport.hosts import own_host
from transport.inproc import InprocFabric
from transport.keys.curve import KeySet
from transport.keys.ring import AnyKeys, as_ring
from transport.reach import Choice, choose
from transport.select import TLSOptions, make_transport

log = structlog.get_logger(__name__)


class Started(NamedTuple):
    """Description of a rank whose model is loaded and whose channels are open."""

    info: RankInfo
    spec: ModelSpec
    fingerprint: str
    """Fingerprint of the rank's model (`ModelSource.fingerprint`)."""
    pid: int
    host: str
    """Host name of the process `pid`."""
    memory: str
    """Use of the device memory, as a text: KV pool, weights, steps and others."""
    transport: str
    """Name of the rank's transport (`Choice.name`)."""
    pool_tokens: int
    """Tokens that the rank's KV pool holds."""


class RankRecord(NamedTuple):
    """Data that a launch needs to adopt a rank of another launch."""

    process: ProcessIdentity
    config: Config
    keys: frozenset[str]
    """Names of the key generations that are valid on the rank."""
    group: GroupInfo | None
    started: Started | None
    linked: tuple[GroupInfo, ...]
    """Groups of the other role, without those whose ranks were reported as dead."""
    unusable: str
    """Reason why the rank cannot be adopted; empty if the rank serves."""
    counts: GroupCounts = NO_COUNTS
    """Numbers of groups from the former owner's latest pulse."""


class ClaimReply(NamedTuple):
    """Reply of a rank to a launch that claims the rank."""

    epoch: int
    """Epoch of the rank's owner after the claim."""
    record: RankRecord | None
    """Data for the adoption. None: the claim was refused, because the owner is alive or its epoch is not lower."""


def freeze_objects() -> None:
    """Excludes every current object from garbage collection: a full collection would stop all threads for 0.2 s.

    Call this function only in a process that runs one rank, where libraries and the model exist until the process
    ends.
    """
    gc.collect()
    gc.freeze()


class RankHost:
    """Owns one `RankNode`. Call order: `identify`, `rendezvous` (rank 0 only), `start`, `join`, `link`, `stop`.

    Threads may call `claim`, `park` and `pulse` at the same time as each other and as any other method.
    """

    node_class: ClassVar[type[RankNode[Any, Any, Any]]]

    def __init__(
        self,
        rank: int,
        config: Config,
        keys: AnyKeys,
        name: str = "",
        owner: Owner = NO_OWNER,
        release: Callable[[], None] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`name`: the group's name; by default its role.

        `release` frees the group's resources and ends its ranks. The host calls `release` when no owner has sent a
        pulse for `cluster.adopt_timeout_s`. If `release` is None, the rank ends with the process that started it.
        `clock` measures the owner's pulses.
        """
        configure(config.log)
        self._rank, self._config, self._keys, self._name = rank, config, as_ring(keys), name
        self.node: RankNode[Any, Any, Any] | None = None
        """The rank; None before `start`."""
        self._collective: Collective | None = None
        self._meeting_folder = ""
        self._over, self._broken = False, ""
        self._changed = threading.Condition()  # guards the two fields above and the owner
        self._ownership = Ownership(owner, config.cluster.hang_timeout_s, clock)
        self._group: GroupInfo | None = None
        self._started: Started | None = None
        self._linked: tuple[GroupInfo, ...] = ()
        if release is not None:
            threading.Thread(
                target=self._end_when_abandoned, args=(release,), name="owner-watch", daemon=True
            ).start()

    @property
    def group_config(self) -> GroupConfig:
        """The configuration section of this rank's group."""
        group: GroupConfig = getattr(self._config, self.node_class.role)
        return group

    def identify(self) -> ProcessIdentity:
        """Returns the identity of this process, and makes the process end when its parent ends."""
        die_with_parent()
        return ProcessIdentity.own()

    def pulse(self, token: str = "", counts: GroupCounts = NO_COUNTS) -> bool:
        """Records a pulse of the owner; returns False if the caller is not the owner.

        Returns at once: the reply proves to the caller that this interpreter runs.
        """
        return self._ownership.pulse(token, counts)

    def claim(self, claimant: Owner) -> ClaimReply:
        """Makes `claimant` the owner if the current owner is dead; the reply then has the data for an adoption."""
        with self._changed:
            granted = self._ownership.claim(claimant)
            self._changed.notify_all()  # ends the `park` call of a former owner
        return ClaimReply(self._ownership.epoch, self._record() if granted else None)

    def rendezvous(self, backend: str) -> Rendezvous:
        """Returns the rendezvous of the group's ranks: a private folder that `start` or `stop` removes."""
        if self.group_config.ranks > 1:
            self._meeting_folder = str(private_folder("ranks"))
        return Rendezvous(self._meeting_folder, backend)

    def start(self, rendezvous: Rendezvous) -> Started:
        """Joins the collective, loads the model, opens the control and data channels. Raises `DisaggError`."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        group = self.group_config
        device = resolve_device(group.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        source = make_source(self._config)
        hashing = ThreadPoolExecutor(1, "weights-hash")  # in parallel to the load, which reads the same files
        fingerprint = hashing.submit(lambda: source.fingerprint)
        hashing.shutdown(wait=False)
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
            warm_model(runner, group.chunk_tokens, group.decode_batch or group.max_requests)
            if self.node_class.role == "decode":
                warm_page_copies(runner)
            if self._rank == 0:
                warm_sampling(runner.spec.vocab_size, device)
            if group.graphs and group.decode_batch:
                runner.record(group.decode_batch)
            elif group.graphs:
                runner.record_chunks(group.chunk_tokens)
            if group.graphs and self.node_class.role != "decode":
                runner.record_pieces(group.chunk_tokens, group.decode_batch)
        choice = self._choose_transport()
        self.node = self.node_class(
            rank=self._rank,
            config=_with_checksum(self._config, choice.name),
            group_config=group,
            name=self._name,
            runner=runner,
            control=make_control(self._config.control, self._keys),
            transport=self._make_transport(choice, device),
        )
        self.node.on_broken = self._on_broken
        memory = f"{describe_pool(runner)}; {memory}" if memory else describe_pool(runner)
        info, host = self.node.start(), socket.gethostname()
        log_own_sockets([info], descendants=False)
        freeze_objects()
        spec, tokens = runner.spec, pool_tokens(runner)
        started = Started(info, spec, fingerprint.result(), os.getpid(), host, memory, choice.name, tokens)
        self._started = started
        return started

    def join(self, group: GroupInfo) -> None:
        """Starts the compute thread; call when all ranks of the group have started."""
        self._running().join(group)
        self._group = group

    def link(self, other: GroupInfo) -> None:
        """Connects to a group of the other role."""
        self._running().link(other)
        self._linked = (*self._linked, other)

    def update_keys(self, keys: KeySet) -> None:
        """Replaces the keys of the rank's channels."""
        self._keys.replace(keys)

    def peer_lost(self, address: str) -> None:
        """Ends all work with a dead peer.

        The cluster calls this method, because it may detect the death before this rank.
        """
        self._linked = tuple(
            group for group in self._linked if all(rank.control_address != address for rank in group.ranks)
        )
        self._running().peer_lost(address)

    def spans(self) -> list[TimelineSpan]:
        """Returns the timeline spans since the last call."""
        return self._running().spans()

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics of every structure of the rank."""
        return self._running().statistics()

    def check(self) -> None:
        """Raises `InvariantError` if a structure of the rank is inconsistent."""
        self._running().check()

    def park(self, token: str = "") -> str:
        """Blocks until the rank stops, its group fails, or another launch owns the rank.

        Returns "" after a stop, the reason of a failure, or `DISOWNED` to a former owner. The caller detects the end
        of a rank without polling.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._over or not self._ownership.is_owner(token))
            return self._broken if self._ownership.is_owner(token) else DISOWNED

    def stop(self, drain_timeout_s: float) -> None:
        """Ends requests, threads and connections. Idempotent; does nothing before `start`."""
        self._group = None
        if self.node is not None:
            self.node.stop(drain_timeout_s)
        if self._collective is not None:
            self._collective.close()
        self._remove_meeting_folder()
        self._end_park("")

    def _on_broken(self, reason: str) -> None:
        self._end_park(reason)

    def _end_park(self, reason: str) -> None:
        with self._changed:
            self._over, self._broken = True, self._broken or reason
            self._changed.notify_all()

    def _record(self) -> RankRecord:
        serves = self._group is not None and not self._over
        unusable = "" if serves else self._broken or "its start or its end was interrupted"
        return RankRecord(
            ProcessIdentity.own(),
            self._config,
            self._keys.keys.names,
            self._group,
            self._started,
            self._linked,
            unusable,
            self._ownership.counts,
        )

    def _end_when_abandoned(self, release: Callable[[], None]) -> None:
        timeout_s = self._config.cluster.adopt_timeout_s
        self._ownership.wait_abandoned(timeout_s)
        log.error("abandoned", group=self._name, rank=self._rank, adopt_timeout_s=timeout_s)
        try:
            release()  # frees the resources of all ranks and ends their processes, this process included
        finally:
            os._exit(1)  # Ray may be unreachable

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
            tls=TLSOptions(self._keys, own_host(self._config.control.host), self._config.transport.tls_lanes),
        )

    def _remove_meeting_folder(self) -> None:
        if self._meeting_folder:
            shutil.rmtree(self._meeting_folder, ignore_errors=True)
            self._meeting_folder = ""

    def _running(self) -> RankNode[Any, Any, Any]:
        assert self.node is not None, "a rank is used after start"
        return self.node


def _with_checksum(config: Config, transport: str) -> Config:
    """Returns the configuration with `transfer.checksum` resolved for the transport."""
    transfer = msgspec.structs.replace(config.transfer, checksum=config.transfer.checks(transport))
    return msgspec.structs.replace(config, transfer=transfer)
