"""Starts a cluster, and a router in this process, for `disagg demo`, `generate` and `serve`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from disagg.cluster.adoption import Claimant
from disagg.cluster.keys import own_keys
from disagg.cluster.lifecycle import Cluster
from disagg.cluster.local_ray import PrivateRay
from disagg.cluster.placement import Placement, choose_placement, place_colocated
from disagg.cluster.ray import RayResources, existing_ray, local_ray, start_cluster
from disagg.cluster.start import Progress
from disagg.cluster.supervisor import Announce
from disagg.core.collection import imports_frozen
from disagg.core.config.read import Config
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo
from disagg.router.follow import Follower
from disagg.router.response_dispatcher import ResponseDispatcher
from disagg.router.router import Router
from transport.control.zmq import make_control
from transport.hosts import is_loopback, own_host
from transport.keys.ring import AnyKeys

if TYPE_CHECKING:
    from disagg.model.load.source import ModelSource

CACHE = Path("~/.cache/disagg")
TINY_CHAT = "tiny-chat"
"""Name and folder of the small model that is made and used if no model is configured."""
_MADE = "models-1"
"""Folder of made models. Raise the number when the made files change, so that old files are not used."""
NAMESPACE = "disagg-launch"
"""Prefix of the Ray namespace for groups that can outlive their `disagg launch`."""
TOKEN_BYTES = 16
GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/proc/driver/nvidia/version")
"""Files of which at least one exists where a driver of NVIDIA GPUs runs."""


def with_model(config: Config, progress: Progress) -> Config:
    """Returns the configuration with a model: the configured one, or a tiny checkpoint in the cache folder."""
    if config.model.path or config.model.random_init:
        return config
    directory = CACHE.expanduser() / _MADE / TINY_CHAT
    made = (directory / "tokenizer.json").is_file()
    progress(
        f"no --model given: {'using' if made else 'making'} the small chat model {TINY_CHAT} with random weights in "
        f"{directory}"
    )
    if not made:
        _make_tiny_chat(directory)
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(directory)))


def _make_tiny_chat(directory: Path) -> None:
    """Makes the checkpoint in a temporary folder and renames the folder, so that no process reads a partial one."""
    from disagg.model.load.tiny import make_tiny_checkpoint

    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent) as folder:
        made = make_tiny_checkpoint(Path(folder) / TINY_CHAT)
        with contextlib.suppress(OSError):  # another process has made the folder meanwhile
            made.rename(directory)


def check_split(source: ModelSource, placement: Placement) -> None:
    """Raises `UnsupportedModelError` if the TP sizes of the placement cannot split the model."""
    import torch

    from disagg.model.tensor_parallel import check_tp

    check_tp(source.spec(torch.float32), {role: group.tp for role, group in placement.kinds.items()})


def limit_tokens(config: Config, source: ModelSource) -> int:
    """Returns the largest number of tokens of a prompt plus its answer, as limited by the model and by every kind of
    group."""
    import torch

    context = source.spec(torch.float32).context_tokens
    return min(kind.context_limit(context) for kind in config.kinds.values())


@contextlib.contextmanager
def started_ray(config: Config, progress: Progress, growth: int = 1) -> Iterator[PrivateRay | None]:
    """Starts the private Ray of a machine without GPUs while torch and transformers are imported on a thread.

    Both take seconds, and Ray's start blocks on other processes for most of its time. Yields None where
    `_placement_without_torch` is None, and where `cluster.ray` names an existing cluster.
    """
    placement = _placement_without_torch(config) if config.cluster.ray == "local" else None
    if placement is None:
        yield None
        return
    imports = threading.Thread(target=_import_packages, args=(config,), name="imports", daemon=True)
    imports.start()
    progress("starting Ray")
    with local_ray(growth * placement.ranks) as private:
        imports.join()  # the caller needs the packages next; transformers is not imported on two threads at once
        yield private


def _placement_without_torch(config: Config) -> Placement | None:
    """Returns the placement if no group can run on a GPU. Else None: torch counts the GPUs."""
    on_cpu = all(kind.device == "cpu" for kind in config.kinds.values())
    return place(config, 0) if on_cpu or not any(map(os.path.exists, GPU_FILES)) else None


def _placement_on_gpus(config: Config) -> Placement:
    import torch

    return place(config, torch.cuda.device_count())


def _import_packages(config: Config) -> None:
    """Imports the packages that the main thread needs next. There, a failed import fails again, with its error."""
    with contextlib.suppress(Exception), imports_frozen():
        import disagg.model.load.tokenizer  # noqa: F401
        from disagg.model.load.source import make_source

        # transformers imports the configuration of a model's type when it reads one, some of them with torch._dynamo.
        make_source(config)


@contextlib.contextmanager
def local_cluster(config: Config, progress: Progress, private: PrivateRay | None = None) -> Iterator[Cluster]:
    """Starts or joins Ray, as configured by `cluster.ray`, and starts all groups.

    At the end of the block, the groups stop, and Ray stops if this function started it. TP sizes that are None are
    chosen from the number of GPUs. `private`: a private Ray that runs already, see `started_ray`.
    """
    keys = own_keys(config.control)
    # A port in use raises here, before the models load.
    make_control(config.control, keys, config.control.router_port).close()
    with placed_cluster(config, keys, progress, private=private) as cluster:
        yield cluster


@contextlib.contextmanager
def placed_cluster(
    config: Config,
    keys: AnyKeys,
    progress: Progress,
    growth: int = 1,
    outlives: bool = False,
    private: PrivateRay | None = None,
) -> Iterator[Cluster]:
    """Starts a cluster as `local_cluster` does, with the caller's keys, which routers in other processes can share.

    A private Ray has room for `growth` times the number of ranks at the start. With `outlives`, on an existing Ray
    cluster, the groups survive a kill of this process, and the groups of a process that was killed earlier are
    adopted.
    """
    with contextlib.ExitStack() as stack:
        if private is None:
            private = stack.enter_context(started_ray(config, progress, growth))
        from disagg.model.load.source import make_source

        source = make_source(config)
        claimant = Claimant(secrets.token_hex(TOKEN_BYTES), lambda: source.fingerprint) if outlives else None
        if config.cluster.ray == "local":
            placement = _placement_without_torch(config) or _placement_on_gpus(config)
            check_split(source, placement)
            if private is None:
                progress("starting Ray")
                private = stack.enter_context(local_ray(growth * placement.ranks))
        else:
            progress("connecting to Ray")
            spans_hosts = not is_loopback(own_host(config.control.host))
            namespace = f"{NAMESPACE}/{config.cluster.name}" if outlives else None
            found = stack.enter_context(existing_ray(config.cluster.ray, spans_hosts, namespace))
            placement = place(config, found.gpus)
            check_split(source, placement)
            _check_cpus(placement, found)
        progress(f"placement: {placement.why}")
        yield stack.enter_context(start_cluster(config, placement, keys, progress, private, claimant))


def _check_cpus(placement: Placement, found: RayResources) -> None:
    if placement.ranks > found.cpus:
        raise ConfigError(
            f"the Ray cluster has {found.cpus} CPUs, but each of the {placement.ranks} ranks needs one: add nodes, "
            f"or lower tp or groups of {' and '.join(placement.kinds)}"
        )


def place(config: Config, gpus: int) -> Placement:
    """Returns the placement of all groups on `gpus` GPUs. Raises `ConfigError` if prefill and decode groups are
    configured for different kinds of device."""
    if config.cluster.mode == "colocated":
        group = config.colocated
        return place_colocated(gpus, group.tp, group.device, group.groups)
    devices = {config.prefill.device, config.decode.device}
    if devices == {"cpu", "cuda"}:
        raise ConfigError(
            f"prefill.device = {config.prefill.device} and decode.device = {config.decode.device}: both groups must "
            f"run on the same kind of device; set both to the same value, or one of them to auto"
        )
    device = (devices - {"auto"} or {"auto"}).pop()
    return choose_placement(
        gpus,
        config.prefill.tp,
        config.decode.tp,
        device,
        (config.prefill.groups, config.decode.groups),
    )


@contextlib.asynccontextmanager
async def local_router(cluster: Cluster) -> AsyncIterator[Router]:
    """Starts a router for the cluster's groups on the running event loop; ends it at the end of the block."""
    loop = asyncio.get_running_loop()
    dispatcher = ResponseDispatcher(cluster.control(), loop)

    def lost(address: str) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and its requests with it
            loop.call_soon_threadsafe(dispatcher.lose, address)

    cluster.on_lost(lost)
    dispatcher.start()
    try:
        yield Router(dispatcher, cluster.infos(), config=cluster.config.router)
    finally:
        dispatcher.close()


def follow_cluster(router: Router) -> Announce:
    """Returns a callback that applies a supervisor's announcements to `router`. Must be called on the router's event
    loop."""
    loop, follower = asyncio.get_running_loop(), Follower(router)

    def announce(groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the event loop has ended, and its requests with it
            loop.call_soon_threadsafe(follower.apply, groups, draining)

    return announce
