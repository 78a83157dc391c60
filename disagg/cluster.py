"""The composition root: a cluster whose ranks are Ray actors.

Ray places and watches; once a cluster is up, requests pass over ZMQ and KV over UCX, never through Ray.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from disagg.cluster_life import CALL_TIMEOUT_S, Call, Cluster, Progress
from disagg.core.config import Config, Role
from disagg.core.errors import ConfigError, DisaggError
from disagg.groups import Group
from disagg.placement import GroupPlacement, Placement
from disagg.ray_local import ensure_token, loopback_env, session_folder
from transport.key_ring import AnyKeys
from transport.keys import KeySet

_QUIET: dict[str, Any] = {"logging_level": "warning", "log_to_driver": False, "configure_logging": True}


class RayResources(NamedTuple):
    """What a Ray cluster has in all, used or not."""

    cpus: int
    gpus: int


@contextlib.contextmanager
def start_cluster(
    config: Config, placement: Placement, keys: AnyKeys, progress: Progress = lambda _: None
) -> Iterator[Cluster]:
    """A running cluster; stopped at the end of the block, also when the start fails or Ctrl-C comes."""
    cluster = Cluster(config, placement, keys, RayRanks())
    try:
        cluster.start(progress)
        yield cluster
    finally:
        cluster.stop()


class RayRanks:
    """The ranks' processes as Ray actors; see `disagg.cluster_life.Ranks`. Needs a connection to Ray."""

    def place(
        self,
        role: Role,
        name: str,
        where: GroupPlacement,
        config: Config,
        keys: KeySet,
        given_up: Callable[[], bool],
    ) -> Group:
        """On one node, each rank with a core and its share of a GPU, which Ray sets aside for it."""
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        placed = _reserve(name, where, given_up)
        actor_class = _actor_class(role)
        actors = []
        for rank in range(where.tp):
            strategy = PlacementGroupSchedulingStrategy(placed, placement_group_bundle_index=rank)
            options = actor_class.options(
                num_cpus=1, num_gpus=where.gpus_per_rank, scheduling_strategy=strategy, name=None
            )
            actors.append(options.remote(rank, config, keys, name))
        return Group(name, role, where, actors, placed)

    def results(self, calls: Sequence[Call], timeout_s: float) -> list[Any]:
        """An error of ours comes out as itself, without Ray's wrapping; one of Ray's as `DisaggError`."""
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
                "the machine ran out of memory and Ray killed a rank: choose a smaller model, or lower "
                "pool_tokens of its groups and transfer.ring_bytes"
            ) from exc
        except ray.exceptions.RayError as exc:
            raise DisaggError(f"a rank's process died: {str(exc).splitlines()[0]}") from exc
        return results

    def ended(self, calls: Sequence[Call], timeout_s: float) -> list[Call] | None:
        """None when Ray is gone, and every rank with it."""
        import ray

        try:
            ended, _ = ray.wait(list(calls), timeout=timeout_s)
        except ray.exceptions.RayError:
            return None
        return list(ended)

    def kill(self, group: Group) -> None:
        """Its place stays taken."""
        import ray

        for actor in group.actors:
            ray.kill(actor)

    def take_down(self, group: Group) -> None:
        """Ends what is left of its processes too."""
        import ray

        self.kill(group)
        ray.util.remove_placement_group(group.placement_group)


def _reserve(name: str, where: GroupPlacement, given_up: Callable[[], bool]) -> Any:
    import ray
    from ray.util.placement_group import placement_group

    bundle = {"CPU": 1.0, **({"GPU": where.gpus_per_rank} if where.gpus_per_rank else {})}
    placed = placement_group([bundle] * where.tp, strategy="STRICT_PACK")
    until_s = time.monotonic() + CALL_TIMEOUT_S
    while not (here := placed.wait(1)) and time.monotonic() < until_s:
        if given_up():
            break
    if not here:
        ray.util.remove_placement_group(placed)
        raise ConfigError(
            f"the Ray cluster has no room for the {name} group: it needs {where.tp} x {bundle} on one node, "
            f"free are {ray.available_resources()}"
        )
    return placed


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
def local_ray(ranks: int) -> Iterator[None]:
    """A Ray of our own on this machine, gone at the end: on loopback, for this user. Raises `ConfigError` when Ray is
    missing, or has no place for its files."""
    with loopback_env(), session_folder() as folder:
        ray = _import_ray()
        ensure_token()
        # Ranks are threads of work, not cores: a small machine shares them.
        cpus = max(ranks + 1, os.cpu_count() or 1)
        ray.init(address="local", num_cpus=cpus, include_dashboard=False, _temp_dir=str(folder), **_QUIET)
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
