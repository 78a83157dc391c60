"""The composition root: places both groups with Ray, starts them in order, wires them, and takes them down.

    placement groups -> actors -> start (models load, channels open) -> join -> link -> serving -> stop -> kill

Ray places and watches; once a cluster is up, requests pass over ZMQ and KV over UCX, never through Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import structlog

from disagg.core.config import Config
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.timeline import TimelineSpan
from disagg.core.types import PROTOCOL_VERSION, GroupInfo
from disagg.model.spec import ModelSpec
from disagg.node.host import Started
from disagg.placement import GroupPlacement, Placement
from transport.control import ControlChannel
from transport.control_zmq import make_control
from transport.keys import ControlKeys

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 900.0
"""Loading a large model takes minutes."""
CALL_TIMEOUT_S = 60.0
WATCH_S = 0.2

Progress = Callable[[str], None]
"""Told, in words, what happens now."""


@dataclass(slots=True)
class Group:
    """One engine's actors."""

    name: str
    """Unique in the cluster."""
    role: str
    placement: GroupPlacement
    actors: list[Any]
    placement_group: Any
    started: list[Started] = field(default_factory=list)
    info: GroupInfo | None = None
    lost: set[int] = field(default_factory=set)
    """Ranks whose process is gone."""

    @property
    def spec(self) -> ModelSpec:
        """The model, as the ranks read it."""
        return self.started[0].spec


class Cluster:
    """A prefill and a decode group on Ray. Use `start_cluster`, which also cleans up when a start fails."""

    def __init__(self, config: Config, placement: Placement, keys: ControlKeys | None) -> None:
        self.config = _with_placement(config, placement)
        self.placement = placement
        self._keys = keys
        self.groups: list[Group] = []
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)
        self._on_lost: list[Callable[[str], None]] = []

    # --- life

    def start(self, progress: Progress) -> None:
        """Brings both groups up and links them. Raises what a rank raised, as itself."""
        for role, where in (("prefill", self.placement.prefill), ("decode", self.placement.decode)):
            for number in range(1, where.groups + 1):
                name = role if number == 1 else f"{role}-{number}"
                progress(f"placing {where.tp} {name} rank{'s' * (where.tp > 1)} on {where.device}")
                self.groups.append(self._place(name, role, where))
        progress("loading the model on every rank")
        pending = [(group, self._start_ranks(group)) for group in self.groups]
        for group, refs in pending:
            group.started = _get(refs, START_TIMEOUT_S)
            group.info = _group_info(group, self.config)
        progress("connecting the groups")
        for group in self.groups:
            self._all(group, "join", group.info)
        pairs = list(itertools.product(self._of("prefill"), self._of("decode")))
        for prefill, decode in pairs:
            self._all(prefill, "link", decode.info)
            self._all(decode, "link", prefill.info)
        for prefill, decode in pairs:
            self._calibrate(prefill, decode)
        self._watcher.start()

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Gracefully, then by force: when this returns no actor process of the cluster is left."""
        import ray

        self._stopping.set()
        if self._watcher.is_alive():
            self._watcher.join()
        for group in self.groups:
            refs = [actor.stop.remote(drain_timeout_s) for actor in self._alive(group)]
            with contextlib.suppress(Exception):  # who does not stop by itself is killed below
                ray.get(refs, timeout=drain_timeout_s + 10.0)
        for group in self.groups:
            for actor in group.actors:
                ray.kill(actor)
            ray.util.remove_placement_group(group.placement_group)
        self._wait_for_exit()

    def control(self) -> ControlChannel:
        """A control channel for a router of this cluster; the caller starts and closes it."""
        return make_control(self.config.control, self._keys, self.config.control.router_port)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Calls back with the control address of every rank that dies."""
        self._on_lost.append(callback)

    # --- looking in

    @property
    def prefill(self) -> Group:
        """The first prefill group."""
        return self._of("prefill")[0]

    @property
    def decode(self) -> Group:
        """The first decode group."""
        return self._of("decode")[0]

    def infos(self) -> list[GroupInfo]:
        """What a router must know of the groups."""
        return [group.info for group in self.groups if group.info is not None]

    def spans(self) -> list[TimelineSpan]:
        """What happened on all ranks since the last call."""
        return [span for group in self.groups for spans in self._all(group, "spans") for span in spans]

    def check(self) -> None:
        """Raises `InvariantError` when a structure of any rank finds its books wrong."""
        for group in self.groups:
            self._all(group, "check")

    def statistics(self) -> dict[str, Any]:
        """Every rank's statistics, by `group rank`."""
        return {
            f"{group.name} r{rank}": statistics
            for group in self.groups
            for rank, statistics in enumerate(self._all(group, "statistics"))
        }

    # --- inside

    def _of(self, role: str) -> list[Group]:
        return [group for group in self.groups if group.role == role]

    def _place(self, name: str, role: str, where: GroupPlacement) -> Group:
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        bundle = {"CPU": 1.0, **({"GPU": where.gpus_per_rank} if where.gpus_per_rank else {})}
        placed = placement_group([bundle] * where.tp, strategy="STRICT_PACK")
        if not placed.wait(CALL_TIMEOUT_S):
            ray.util.remove_placement_group(placed)
            raise ConfigError(
                f"the Ray cluster has no room for the {name} group: it needs {where.tp} x {bundle} on one node, "
                f"free are {ray.available_resources()}"
            )
        actor_class = _actor_class(role)
        actors = []
        for rank in range(where.tp):
            strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=rank)
            options = actor_class.options(
                num_cpus=1, num_gpus=where.gpus_per_rank, scheduling_strategy=strategy, name=None
            )
            actors.append(options.remote(rank, self.config, self._keys, name))
        return Group(name, role, where, actors, placed)

    def _start_ranks(self, group: Group) -> list[Any]:
        rendezvous = _get([group.actors[0].rendezvous.remote(group.placement.backend)], CALL_TIMEOUT_S)[0]
        return [actor.start.remote(rendezvous) for actor in group.actors]

    def _calibrate(self, prefill: Group, decode: Group) -> None:
        """One rank after the other: a wire is measured while nobody else uses it. Says what was found, once."""
        from prefill_node.calibration import OVERRIDE

        said: set[tuple[str, str]] = set()
        for rank, actor in enumerate(prefill.actors):
            found = _get([actor.calibrate.remote(decode.info)], CALL_TIMEOUT_S)[0]
            if found is not None and (found.path, found.chosen) not in said:
                said.add((found.path, found.chosen))
                say = log.warning if found.failed else log.info
                words = {"path": found.path, "found": found.found, "chosen": found.chosen}
                say("wire", link=f"{prefill.name} rank {rank} to {decode.name}", **words, override=OVERRIDE)

    def _all(self, group: Group, method: str, *arguments: Any) -> list[Any]:
        return _get([getattr(a, method).remote(*arguments) for a in self._alive(group)], CALL_TIMEOUT_S)

    def _alive(self, group: Group) -> list[Any]:
        return [actor for rank, actor in enumerate(group.actors) if rank not in group.lost]

    def _watch(self) -> None:
        """Tells the others when a rank's process dies: `park` ends only with its process (or its stop)."""
        import ray

        parked = {a.park.remote(): (g, rank) for g in self.groups for rank, a in enumerate(g.actors)}
        while parked and not self._stopping.is_set():
            try:
                ended, _ = ray.wait(list(parked), timeout=WATCH_S)
            except ray.exceptions.RayError:
                return  # Ray is gone, and every rank with it
            for ref in ended:
                group, rank = parked.pop(ref)
                if not self._stopping.is_set():
                    self._lost(group, rank)

    def _lost(self, group: Group, rank: int) -> None:
        address = group.started[rank].info.control_address
        log.error("rank_lost", group=group.name, rank=rank, address=address)
        group.lost.add(rank)
        for other in self.groups:
            for actor in self._alive(other):
                actor.peer_lost.remote(address)
        for callback in self._on_lost:
            callback(address)

    def _wait_for_exit(self) -> None:
        pids = [started.pid for group in self.groups for started in group.started]
        until_s = time.monotonic() + 10.0
        while any(_runs(pid) for pid in pids) and time.monotonic() < until_s:
            time.sleep(0.02)


@contextlib.contextmanager
def local_ray(ranks: int) -> Iterator[None]:
    """A Ray of our own on this machine, gone at the end. Raises `ConfigError` when Ray is missing."""
    # Set before Ray is imported, which reads it then. Tokens: nobody else on this machine can join.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # When a start fails on every rank, one error is raised; Ray would print the others as unhandled.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Else a call that comes after the end, of a watcher that Ctrl-C left alone, starts a whole new Ray.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError as exc:
        raise ConfigError("Ray is not installed: pip install 'ray==2.60.0'") from exc
    cpus = max(
        ranks + 1, os.cpu_count() or 1
    )  # ranks are threads of work, not cores: a small machine shares them
    ray.init(
        address="local",
        num_cpus=cpus,
        include_dashboard=False,
        logging_level="warning",
        log_to_driver=False,
        configure_logging=True,
    )
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def start_cluster(
    config: Config, placement: Placement, keys: ControlKeys | None, progress: Progress = lambda _: None
) -> Iterator[Cluster]:
    """A running cluster; stopped at the end of the block, also when the start fails or Ctrl-C comes."""
    cluster = Cluster(config, placement, keys)
    try:
        cluster.start(progress)
        yield cluster
    finally:
        cluster.stop()


def _with_placement(config: Config, placement: Placement) -> Config:
    """The configuration with what the placement chose, so that every rank is told the same."""
    replace = msgspec.structs.replace
    return replace(
        config,
        prefill=replace(config.prefill, tp=placement.prefill.tp, device=placement.prefill.device),
        decode=replace(config.decode, tp=placement.decode.tp, device=placement.decode.device),
    )


def _group_info(group: Group, config: Config) -> GroupInfo:
    page_size = config.prefill.page_size if group.role == "prefill" else config.decode.page_size
    return GroupInfo(
        name=group.name,
        role=group.role,
        protocol_version=PROTOCOL_VERSION,
        fingerprint=group.spec.fingerprint,
        layout=group.spec.layout,
        page_size=page_size,
        transport=config.transport.backend,
        ranks=tuple(started.info for started in group.started),
    )


def _actor_class(role: str) -> Any:
    if role == "prefill":
        from prefill_node.actor import PrefillActor

        return PrefillActor
    from decode_node.actor import DecodeActor

    return DecodeActor


def _get(refs: Sequence[Any], timeout_s: float) -> list[Any]:
    """Results of remote calls; an error of ours comes out as itself, without Ray's wrapping."""
    import ray

    try:
        results: list[Any] = ray.get(list(refs), timeout=timeout_s)
    except ray.exceptions.RayTaskError as exc:
        if isinstance(exc.cause, DisaggError):
            raise exc.cause from exc
        raise
    except ray.exceptions.GetTimeoutError as exc:
        raise DisaggError(f"a rank did not answer within {timeout_s:g} s") from exc
    except ray.exceptions.OutOfMemoryError as exc:
        raise DisaggError(
            "the machine ran out of memory and Ray killed a rank: choose a smaller model, or lower "
            "prefill/decode.pool_tokens and transfer.ring_bytes"
        ) from exc
    except ray.exceptions.RayError as exc:
        raise DisaggError(f"a rank's process died: {str(exc).splitlines()[0]}") from exc
    return results


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
