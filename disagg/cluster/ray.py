"""Runs a cluster's ranks as Ray actors, on a private or an existing Ray. This module is the composition root.

Ray places and supervises processes. Requests travel over ZMQ and KV over UCX, never through Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

from disagg.cluster.adoption import Claimant
from disagg.cluster.causes import OomCounters, cause_of_death
from disagg.cluster.group import Group, group_order
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.local_ray import (
    PrivateRay,
    ensure_token,
    guarded,
    handlers_kept,
    loopback_env,
    session_folder,
)
from disagg.cluster.placement import GroupPlacement, Placement
from disagg.cluster.ranks import CALL_TIMEOUT_S, Call, NoRoomError, UnavailableError
from disagg.cluster.settings import GroupSettings
from disagg.cluster.start import Progress
from disagg.core.config.read import Config, Role
from disagg.core.errors import ConfigError, DisaggError, first_line
from disagg.node.ownership import Owner
from transport.keys.curve import KeySet
from transport.keys.ring import AnyKeys

_QUIET: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False, "configure_logging": True}


class RayResources(NamedTuple):
    """Numbers of CPUs and GPUs of a Ray cluster, used and free together."""

    cpus: int
    gpus: int


@contextlib.contextmanager
def start_cluster(
    config: Config,
    placement: Placement,
    keys: AnyKeys,
    progress: Progress = lambda _: None,
    ray: PrivateRay | None = None,
    claimant: Claimant | None = None,
) -> Iterator[Cluster]:
    """Starts a cluster; stops it at the end of the block, and also after a failed start or Ctrl-C.

    If a server of the private Ray `ray` dies, the cluster ends all ranks. With a `claimant`, the groups survive a
    kill of this process, and the cluster adopts the groups of a process that was killed earlier.
    """
    cluster = Cluster(config, placement, keys, RayRanks(ray), claimant)
    try:
        cluster.start(progress)
        yield cluster
    finally:
        cluster.stop()


class RayRanks:
    """Implements `disagg.cluster.ranks.Ranks` with Ray actors. Needs a connection to Ray."""

    def __init__(self, private: PrivateRay | None = None) -> None:
        self._private, self._oom_counters = private, OomCounters()

    def place(
        self,
        name: str,
        settings: GroupSettings,
        keys: KeySet,
        owner: Owner,
        given_up: Callable[[], bool],
    ) -> Group:
        """Places the group on one node; Ray reserves a core and a share of a GPU for each rank.

        If `owner` has a token, the actors and the placement group get names in the namespace of `existing_ray`, by
        which a later launch finds the group.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        where, config, outlives = settings.where, settings.placed, bool(owner.token)
        placed = _reserve(name, where, outlives, given_up)
        release = partial(ray.util.remove_placement_group, placed) if outlives else None
        actor_class = _actor_class(settings.role)
        actors = []
        for rank in range(where.tp):
            strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=rank)
            options = actor_class.options(
                num_cpus=1,
                num_gpus=where.gpus_per_rank,
                scheduling_strategy=strategy,
                name=f"{name}/{rank}" if outlives else None,
                lifetime="detached" if outlives else None,
            )
            actors.append(options.remote(rank, config, keys, name, owner, release))
        return Group(name, settings.role, where, actors, placed)

    def room(self, where: GroupPlacement) -> int:
        """Returns an upper bound: sums the free resources of all nodes, although a group must fit on one node."""
        cpus, gpus = _free()
        groups = int(cpus) // where.tp
        if where.gpus_per_rank:
            groups = min(groups, int(gpus / (where.gpus_per_rank * where.tp) + 1e-6))
        return groups

    def survivors(self, placement: Placement) -> list[Group]:
        """Finds the groups by the names of actors and placement groups in the namespace of `existing_ray`."""
        import ray

        actors: dict[str, list[Any]] = {name: [] for name in _reserved()}
        named = [name.split("/") for name in ray.util.list_named_actors() if "/" in name]
        for group, rank in sorted(named, key=lambda one: int(one[1])):
            with contextlib.suppress(ValueError):  # ended meanwhile
                actors.setdefault(group, []).append(ray.get_actor(f"{group}/{rank}"))
        return [_survivor(name, actors[name], placement) for name in sorted(actors, key=group_order)]

    def results(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """Returns the results of the calls. Raises a rank's `DisaggError` unwrapped, and Ray's own errors as a
        `DisaggError`."""
        import ray

        try:
            results: list[Any] = ray.get(list(calls), timeout=timeout_s)
        except ray.exceptions.RayTaskError as exc:
            if isinstance(exc.cause, DisaggError):
                raise exc.cause from exc
            raise
        except ray.exceptions.GetTimeoutError as exc:
            raise DisaggError(f"a rank did not answer within {timeout_s:g} s") from exc
        except ray.exceptions.OutOfMemoryError as exc:
            raise DisaggError(
                "the machine ran out of memory and Ray's memory monitor killed a rank: choose a smaller model, or "
                "lower pool_tokens of its groups and transfer.ring_bytes"
            ) from exc
        except ray.exceptions.ActorDiedError as exc:
            logs = self._private.logs if self._private is not None else None
            raise DisaggError(cause_of_death(str(exc), logs, self._oom_counters)) from exc
        except ray.exceptions.ActorUnavailableError as exc:
            raise UnavailableError(f"the connection to a rank was lost: {first_line(exc)}") from exc
        except ray.exceptions.RayError as exc:
            raise DisaggError(f"a rank's process died: {first_line(exc)}") from exc
        return results

    def ended(self, calls: Sequence[Call], timeout_s: float) -> list[Call] | None:
        """Waits until a call completes, at most `timeout_s`; returns the completed calls. None: Ray has stopped."""
        import ray

        try:
            ended, others = ray.wait(list(calls), timeout=timeout_s)
            if ended and others:  # `ray.wait` returns only one completed call
                ended += ray.wait(others, num_returns=len(others), timeout=0)[0]
        except ray.exceptions.RayError:
            return None
        return list(ended)

    def kill(self, group: Group) -> None:
        """Kills the actors; the placement group stays reserved.

        Processes on this host first get SIGKILL, which also ends a process that SIGSTOP has stopped.
        """
        import ray

        for process in group.processes:
            process.kill()
        for actor in group.actors:
            ray.kill(actor)

    def take_down(self, group: Group) -> None:
        """Kills the remaining actors and releases the placement group."""
        import ray

        self.kill(group)
        if (
            not self.failure() and group.placement_group is not None
        ):  # with a dead server this call would block
            ray.util.remove_placement_group(group.placement_group)

    def failure(self) -> str:
        """Returns which server of the private Ray has ended; empty if all run, and always for an existing Ray."""
        return self._private.failure() if self._private is not None else ""


def _reserve(name: str, where: GroupPlacement, outlives: bool, given_up: Callable[[], bool]) -> Any:
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": 1.0, **({"GPU": where.gpus_per_rank} if where.gpus_per_rank else {})}
    options = {"name": _reservation(name), "lifetime": "detached"} if outlives else {}
    try:
        placed = placement_group([bundle] * where.tp, strategy="STRICT_PACK", **options)
    except ray.exceptions.RaySystemError as exc:  # another launch reserves the same name now
        raise ConfigError(
            f"another `disagg launch` with the same cluster.name starts {name} on this Ray cluster: end one, or give "
            f"each its own cluster.name"
        ) from exc
    until_s = time.monotonic() + CALL_TIMEOUT_S
    while not (here := placed.wait(1)) and time.monotonic() < until_s:
        if given_up():
            break
    if not here:
        ray.util.remove_placement_group(placed)
        cpus, gpus = _free()
        raise NoRoomError(
            f"the Ray cluster has no room for the {name} group: it needs {where.tp} x {bundle} on one node, "
            f"free are {cpus:g} CPUs and {gpus:g} GPUs"
        )
    return placed


def _free() -> tuple[float, float]:
    """Returns the free CPUs and GPUs of the Ray cluster."""
    import ray

    free = ray.available_resources()
    return float(free.get("CPU", 0)), float(free.get("GPU", 0))


def _reservation(group: str) -> str:
    """Returns the name of a group's placement group. It has the namespace as a prefix, because Ray lists the
    placement groups of all namespaces."""
    import ray

    return f"{ray.get_runtime_context().namespace}/{group}"


def _reserved() -> list[str]:
    """Returns the names of the groups that have a placement group in this namespace."""
    import ray

    prefix, table = _reservation(""), ray.util.placement_group_table()
    names = [entry["name"] for entry in table.values() if entry["state"] != "REMOVED"]
    return [name.removeprefix(prefix) for name in names if name.startswith(prefix)]


def _survivor(name: str, actors: list[Any], placement: Placement) -> Group:
    import ray

    role = cast(Role, group_order(name)[0])
    where = placement.kinds.get(role, GroupPlacement(len(actors), "cpu", 0.0, "shared"))
    try:
        placed = ray.util.get_placement_group(_reservation(name))
    except ValueError:  # removed meanwhile, so the actors are ending too
        placed = None
    return Group(name, role, where, actors, placed)


def _actor_class(role: Role) -> Any:
    if role == "colocated":
        from disagg.colocated.actor import ColocatedActor

        return ColocatedActor
    if role == "prefill":
        from prefill_node.actor import PrefillActor

        return PrefillActor
    from decode_node.actor import DecodeActor

    return DecodeActor


@contextlib.contextmanager
def local_ray(ranks: int) -> Iterator[PrivateRay]:
    """Runs a private Ray on this machine within the block: on loopback, for this user only.

    Ray's processes end with the block; if this process is killed, a guard process ends them. Raises `ConfigError`
    when Ray is not installed, or its folder cannot be made.
    """
    with loopback_env(), session_folder() as folder, guarded(folder.parent) as private:
        ray = _import_ray()
        ensure_token()
        # A Ray CPU is a slot for one rank, not a core: ranks share the cores of a small machine.
        cpus = max(ranks + 1, os.cpu_count() or 1)
        with handlers_kept(), _own_session(), _needed_servers_only():
            ray.init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=str(folder), **_QUIET)
        private.started()
        try:
            yield private
        finally:
            if private.failure():  # with a dead server, `ray.shutdown` alone would block
                private.kill()
            ray.shutdown()


@contextlib.contextmanager
def existing_ray(address: str, spans_hosts: bool, namespace: str | None = None) -> Iterator[RayResources]:
    """Connects to the running Ray cluster at `address`, `auto` or `host:port`; disconnects at the end of the block.

    `spans_hosts`: whether other hosts can reach the ranks. `namespace`: Ray namespace for the names of groups that
    outlive this process. Within a Ray job, `auto` is the job's cluster. Raises `ConfigError` if the cluster does not
    answer, rejects the token, or has several nodes although `spans_hosts` is False.
    """
    ray = _import_ray()
    try:
        _check_reachable(address)
        with handlers_kept():
            ray.init(address=address, namespace=namespace, **_QUIET)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as exc:
        raise ConfigError(
            f"no Ray cluster to join at {address!r}: {first_line(exc)} (cluster.ray, RAY_ADDRESS; "
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
        ray.shutdown()  # for a joined cluster, this closes the connection only


@contextlib.contextmanager
def _own_session() -> Iterator[None]:
    """Puts the processes that Ray starts within the block, and their children, into sessions of their own.

    A service manager or a terminal sends a signal to the whole process group of the command. In that group, Ray's
    servers would end before the ranks, and calls to the servers would block for a minute. Ray has no option for this.
    """
    from ray._private import services

    popen = services.ConsolePopen
    services.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        services.ConsolePopen = popen


@contextlib.contextmanager
def _needed_servers_only() -> Iterator[None]:
    """Starts no autoscaler, no log monitor and no dashboard server within the block.

    A private Ray has one node, and the output of ranks goes to log files only. Ray would start all three servers,
    even without a dashboard, and `ray.init` would wait for the last one. Ray has no option for this. A server that
    another version of Ray starts by other means runs idly.
    """
    from ray._private.node import Node

    servers = ("start_monitor", "start_log_monitor", "start_api_server")
    methods = {name: getattr(Node, name) for name in servers if hasattr(Node, name)}
    for name in methods:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, method in methods.items():
            setattr(Node, name, method)


def _check_reachable(address: str) -> None:
    """Raises `OSError` at once if no server listens at `address`; Ray itself would retry for minutes."""
    host, _, port = (os.environ.get("RAY_ADDRESS", "") if address == "auto" else address).rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=5.0).close()


def _import_ray() -> Any:
    # Ray reads these variables at import. The token keeps other users of this machine out.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # A start that fails on every rank raises one error; Ray would print the errors of other ranks as unhandled.
    os.environ.setdefault("RAY_IGNORE_UNHANDLED_ERRORS", "1")
    # Ray's default niceness of 15 starves ranks when the router or a client needs the same cores.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # With auto-connect, a late call of a watcher thread after Ctrl-C would start a new Ray.
    os.environ["RAY_ENABLE_AUTO_CONNECT"] = "0"
    try:
        import ray
    except ImportError as exc:
        raise ConfigError("Ray is not installed: pip install 'ray==2.60.0'") from exc
    return ray
