"""The composition root: places all groups with Ray, starts them in order, wires them, and takes them down.

    placement groups -> actors -> start (models load, channels open) -> join -> link -> serving -> stop -> kill

Ray places and watches; once a cluster is up, requests pass over ZMQ and KV over UCX, never through Ray.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import structlog

from disagg.core.config import Config, Role
from disagg.core.errors import ConfigError, DisaggError
from disagg.core.timeline import TimelineSpan
from disagg.core.types import GroupInfo
from disagg.groups import Group, group_info, wait_for_exit, with_placement
from disagg.placement import Placement
from transport.control import ControlChannel
from transport.control_zmq import make_control
from transport.keys import ControlKeys

log = structlog.get_logger(__name__)

START_TIMEOUT_S = 900.0
"""Loading a large model takes minutes."""
CALL_TIMEOUT_S = 60.0
WATCH_S = 0.2
_QUIET: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False, "configure_logging": True}

Progress = Callable[[str], None]
"""Told, in words, what happens now."""


class RayResources(NamedTuple):
    """What a Ray cluster has in all, used or not."""

    cpus: int
    gpus: int


class Cluster:
    """A cluster's groups, of the kinds that its placement has, on Ray.

    Use `start_cluster`, which also cleans up when a start fails. One thread at a time may add and stop groups; the
    others only look.
    """

    def __init__(self, config: Config, placement: Placement, keys: ControlKeys | None) -> None:
        self.config = with_placement(config, placement)
        self.placement = placement
        self._keys = keys
        self.groups: tuple[Group, ...] = ()
        """All that were placed and not taken down; replaced as a whole, so that every thread may go over it."""
        self._numbers = {role: itertools.count(1) for role in placement.kinds}
        self._parked: dict[Any, tuple[Group, int]] = {}
        self._lock = threading.Lock()  # for `groups` and `_parked`
        self._stopping, self._no_more_groups = threading.Event(), threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="cluster-watch", daemon=True)
        self._on_lost: list[Callable[[str], None]] = []
        self._on_group_lost: list[Callable[[Group], None]] = []

    # --- life

    def start(self, progress: Progress) -> None:
        """Brings all groups up and links them. Raises what a rank raised, as itself."""
        for role, where in self.placement.kinds.items():
            for _ in range(where.groups):
                self._place(role, progress)
        self._bring_up(self.groups, progress)
        self._watcher.start()

    def add_group(self, role: Role, progress: Progress) -> Group:
        """Places, starts and links one more group, under a name that none had before.

        Raises as `start`, and `ConfigError` for a role that this cluster has none of; then nothing of it is left.
        """
        if role not in self.placement.kinds:
            raise ConfigError(
                f"this cluster has no {role} groups, only {' and '.join(self.placement.kinds)} (cluster.mode)"
            )
        group = self._place(role, progress)
        try:
            self._bring_up([group], progress)
        except BaseException:
            self.take_down(group)
            raise
        return group

    def stop_group(self, group: Group, drain_timeout_s: float) -> None:
        """Waits so long for its requests, then ends it."""
        import ray

        group.leaving = True
        refs = [actor.stop.remote(drain_timeout_s) for actor in self._alive(group)]
        with contextlib.suppress(Exception):  # who does not stop by itself is killed
            ray.get(refs, timeout=drain_timeout_s + 10.0)
        self.take_down(group)

    def take_down(self, group: Group) -> None:
        """Kills what is left of a group and gives its place back. Its peers hear of each rank as it ends."""
        import ray

        group.leaving = True
        with self._lock:
            self.groups = tuple(one for one in self.groups if one is not group)
        for actor in group.actors:
            ray.kill(actor)
        ray.util.remove_placement_group(group.placement_group)

    def abandon_start(self) -> None:
        """Makes an `add_group` of another thread fail soon."""
        import ray

        self._no_more_groups.set()
        for actor in [actor for group in self.groups if not group.up for actor in group.actors]:
            ray.kill(actor)

    def stop(self, drain_timeout_s: float = 0.0) -> None:
        """Gracefully, then by force: when this returns no actor process of the cluster is left."""
        self._stopping.set()
        self._no_more_groups.set()
        if self._watcher.is_alive():
            self._watcher.join()
        groups = self.groups
        for group in groups:
            self.stop_group(group, drain_timeout_s)
        wait_for_exit(groups)

    def control(self) -> ControlChannel:
        """A control channel for a router of this cluster; the caller starts and closes it."""
        return make_control(self.config.control, self._keys, self.config.control.router_port)

    def on_lost(self, callback: Callable[[str], None]) -> None:
        """Calls back with the control address of every rank that dies."""
        self._on_lost.append(callback)

    def on_group_lost(self, callback: Callable[[Group], None]) -> None:
        """Calls back, on the watcher's thread, with a group that was up when its first rank dies."""
        self._on_group_lost.append(callback)

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
        """What a router must know of the groups that are up."""
        return [group.info for group in self.groups if group.up and group.info is not None]

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

    def _of(self, role: Role) -> list[Group]:
        return [group for group in self.groups if group.role == role]

    def _place(self, role: Role, progress: Progress) -> Group:
        """Takes a place and starts the processes. Names count up, also past groups that are gone."""
        import ray
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where, number = self.placement.kinds[role], next(self._numbers[role])
        name = role if number == 1 else f"{role}-{number}"
        progress(f"placing {where.tp} {name} rank{'s' * (where.tp > 1)} on {where.device}")
        bundle = {"CPU": 1.0, **({"GPU": where.gpus_per_rank} if where.gpus_per_rank else {})}
        placed = placement_group([bundle] * where.tp, strategy="STRICT_PACK")
        until_s = time.monotonic() + CALL_TIMEOUT_S
        while not (here := placed.wait(1)) and time.monotonic() < until_s:
            if self._no_more_groups.is_set():
                break
        if not here:
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
        group = Group(name, role, where, actors, placed)
        with self._lock:
            self.groups = (*self.groups, group)
        return group

    def _bring_up(self, new: Sequence[Group], progress: Progress) -> None:
        progress("loading the model on every rank")
        pending = [(group, self._start_ranks(group)) for group in new]
        for group, refs in pending:
            group.started = _get(refs, START_TIMEOUT_S)
            log.info("memory", group=group.name, ranks=len(group.started), each=group.started[0].memory)
            group.info = group_info(group, self.config)
        progress("connecting the groups")
        for group in new:
            self._all(group, "join", group.info)
        with self._lock:
            self._parked.update({a.park.remote(): (g, rank) for g in new for rank, a in enumerate(g.actors)})
        for prefill, decode in itertools.product(self._of("prefill"), self._of("decode")):
            if prefill in new or decode in new:
                self._link(prefill, decode, new)
        for group in new:
            with self._lock:
                if group.lost:
                    raise DisaggError(f"{group.name} lost rank {min(group.lost)} while it was linked")
                group.up = True

    def _link(self, prefill: Group, decode: Group, new: Sequence[Group]) -> None:
        try:
            self._all(prefill, "link", decode.info)
            self._all(decode, "link", prefill.info)
            self._calibrate(prefill, decode)
        except DisaggError as exc:
            if any(group.lost and group not in new for group in (prefill, decode)):
                log.warning(
                    "link_with_a_dead_group", prefill=prefill.name, decode=decode.name, error=str(exc)
                )
            else:
                raise

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

        while not self._stopping.is_set():
            with self._lock:
                parked = list(self._parked)
            if not parked:
                self._stopping.wait(WATCH_S)
                continue
            try:
                ended, _ = ray.wait(parked, timeout=WATCH_S)
            except ray.exceptions.RayError:
                return  # Ray is gone, and every rank with it
            for ref in ended:
                with self._lock:
                    group, rank = self._parked.pop(ref)
                if not self._stopping.is_set():
                    self._lost(group, rank)

    def _lost(self, group: Group, rank: int) -> None:
        address = group.started[rank].info.control_address
        with self._lock:
            dies = group.up and not group.leaving and not group.lost
            group.lost.add(rank)
        if not group.leaving:
            log.error("rank_lost", group=group.name, rank=rank, address=address)
        for other in [one for one in self.groups if one.info is not None]:
            for actor in self._alive(other):
                actor.peer_lost.remote(address)
        for callback in self._on_lost:
            callback(address)
        for tell in self._on_group_lost if dies else ():
            tell(group)


@contextlib.contextmanager
def local_ray(ranks: int) -> Iterator[None]:
    """A Ray of our own on this machine, gone at the end. Raises `ConfigError` when Ray is missing."""
    ray = _import_ray()
    # Ranks are threads of work, not cores: a small machine shares them.
    cpus = max(ranks + 1, os.cpu_count() or 1)
    ray.init(address="local", num_cpus=cpus, include_dashboard=False, **_QUIET)
    try:
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def existing_ray(address: str, spans_hosts: bool) -> Iterator[RayResources]:
    """A connection to a Ray cluster that runs already: `auto`, or `host:port`. It goes on after the block.

    `spans_hosts`: ranks can be reached from other hosts. Within a Ray job, `auto` is the job's cluster. Raises
    `ConfigError` when there is no such cluster, it does not let us in, or it has several nodes and ranks are not
    reachable.
    """
    ray = _import_ray()
    try:
        _knock(address)
        ray.init(address=address, **_QUIET)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as exc:
        raise ConfigError(
            f"no Ray cluster to join at {address!r}: {str(exc).strip().splitlines()[0]} (cluster.ray, RAY_ADDRESS; "
            f"RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']})"
        ) from exc
    try:
        nodes = sum(1 for node in ray.nodes() if node["Alive"])
        if nodes > 1 and not spans_hosts:
            raise ConfigError(
                f"the Ray cluster has {nodes} nodes, and ranks on loopback cannot be reached from other hosts: set "
                f"control.host to auto"
            )
        found = ray.cluster_resources()
        yield RayResources(int(found.get("CPU", 0)), int(found.get("GPU", 0)))
    finally:
        ray.shutdown()  # of a cluster that we did not start this ends the connection only


def _knock(address: str) -> None:
    """Raises `OSError` at once where nobody listens: Ray would try for minutes."""
    host, _, port = (os.environ.get("RAY_ADDRESS", "") if address == "auto" else address).rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5.0).close()


def _import_ray() -> Any:
    # Set before Ray is imported, which reads it then. Tokens: nobody else on this machine can join.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # When a start fails on every rank, one error is raised; Ray would print the others as unhandled.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's default of 15 leaves ranks nothing where others want their cores: the router, or a client beside it.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # Else a call that comes after the end, of a watcher that Ctrl-C left alone, starts a whole new Ray.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError as exc:
        raise ConfigError("Ray is not installed: pip install 'ray==2.60.0'") from exc
    return ray


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


def _actor_class(role: Role) -> Any:
    if role == "colocated":
        from disagg.colocated.actor import ColocatedActor

        return ColocatedActor
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
            "pool_tokens of its groups and transfer.ring_bytes"
        ) from exc
    except ray.exceptions.RayError as exc:
        raise DisaggError(f"a rank's process died: {str(exc).splitlines()[0]}") from exc
    return results
