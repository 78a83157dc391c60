"""A cluster started from here and a router in this process: what `disagg demo`, `generate` and `serve` run on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path

import msgspec
import torch

from disagg.cluster import RayResources, existing_ray, local_ray, start_cluster
from disagg.cluster_keys import own_keys
from disagg.cluster_life import Cluster, Progress
from disagg.core.config import Config, RouterConfig
from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.core.types import GroupInfo
from disagg.model.source import ModelSource
from disagg.model.tp import query_spans
from disagg.node.assemble import make_source
from disagg.placement import Placement, choose_placement, place_colocated
from disagg.router.follow import Follower
from disagg.router.mail import MailRoom
from disagg.router.policy import POLICIES
from disagg.router.router import Router
from disagg.supervisor import Tell
from transport.control_zmq import make_control
from transport.hosts import is_loopback, own_host
from transport.key_ring import AnyKeys

CACHE = Path("~/.cache/disagg")


def with_model(config: Config, progress: Progress) -> Config:
    """The configuration with a model in it: when none was named, a small one made in the cache folder."""
    if config.model.path or config.model.random_init:
        return config
    from disagg.model.tiny import make_tiny_checkpoint

    directory = CACHE.expanduser() / "tiny-llama-1"
    if not (directory / "tokenizer.json").is_file():
        progress(f"no --model given: making a small Llama with random weights in {directory}")
        make_tiny_checkpoint(directory)
    else:
        progress(f"no --model given: using the small Llama with random weights in {directory}")
    return msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, path=str(directory)))


def check_split(source: ModelSource, placement: Placement) -> None:
    """Raises `UnsupportedModelError` when the model cannot be split as placed; before anything is started."""
    spec = source.spec(torch.float32)
    for role, group in placement.kinds.items():
        try:
            query_spans(spec, 0, group.tp)
        except UnsupportedModelError as exc:
            raise UnsupportedModelError(f"{role}.tp = {group.tp}: {exc}") from exc


def limit_tokens(config: Config, source: ModelSource) -> int:
    """Tokens that a prompt and its answer may have together: the model's and every kind of group's."""
    context = source.spec(torch.float32).context_tokens
    return min(context, *(kind.max_context_tokens for kind in config.kinds.values()))


@contextlib.contextmanager
def local_cluster(config: Config, progress: Progress) -> Iterator[Cluster]:
    """Ray (or a connection to one, `cluster.ray`) and all groups, ready to serve; what is ours is gone at the end.

    A TP size of None is chosen from what there is.
    """
    keys = own_keys(config.control)
    make_control(
        config.control, keys, config.control.router_port
    ).close()  # in use? Said before all is loaded
    with placed_cluster(config, keys, progress) as cluster:
        yield cluster


@contextlib.contextmanager
def placed_cluster(config: Config, keys: AnyKeys, progress: Progress, growth: int = 1) -> Iterator[Cluster]:
    """As `local_cluster`, for a router that may be elsewhere: the keys are the caller's.

    A Ray of our own has room for `growth` times the ranks of the start.
    """
    source = make_source(config)
    with contextlib.ExitStack() as stack:
        if config.cluster.ray == "local":
            placement = place(config, torch.cuda.device_count())
            check_split(source, placement)
            progress("starting Ray")
            stack.enter_context(local_ray(growth * placement.ranks))
        else:
            progress("connecting to Ray")
            spans_hosts = not is_loopback(own_host(config.control.host))
            found = stack.enter_context(existing_ray(config.cluster.ray, spans_hosts))
            placement = place(config, found.gpus)
            check_split(source, placement)
            _check_cpus(placement, found)
        progress(f"placement: {placement.why}")
        yield stack.enter_context(start_cluster(config, placement, keys, progress))


def _check_cpus(placement: Placement, found: RayResources) -> None:
    if placement.ranks > found.cpus:
        raise ConfigError(
            f"the Ray cluster has {found.cpus} CPUs, but each of the {placement.ranks} ranks needs one: add nodes, "
            f"or lower tp or groups of {' and '.join(placement.kinds)}"
        )


def place(config: Config, gpus: int) -> Placement:
    """Where all groups run, of so many GPUs. Raises `ConfigError` when one must have a GPU and another must not."""
    if config.cluster.mode == "colocated":
        group = config.colocated
        return place_colocated(gpus, group.tp, group.device, group.groups)
    devices = {config.prefill.device, config.decode.device}
    if devices == {"cpu", "cuda"}:
        raise ConfigError(
            f"prefill.device = {config.prefill.device} and decode.device = {config.decode.device}: both groups run "
            f"on the same kind of device; set both to one, or one to auto"
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
    """A router of the cluster, on the running event loop."""
    loop = asyncio.get_running_loop()
    mail = MailRoom(cluster.control(), loop)

    def lost(address: str) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its requests with it
            loop.call_soon_threadsafe(mail.lose, address)

    cluster.on_lost(lost)
    mail.start()
    try:
        yield make_router(mail, cluster.config.router, cluster.infos())
    finally:
        mail.close()


def make_router(mail: MailRoom, config: RouterConfig, groups: Sequence[GroupInfo] = ()) -> Router:
    """A router as configured."""
    choose = POLICIES[config.policy]
    return Router(mail, groups, reserve_retry_s=config.reserve_retry_s, choose=choose)


def follow_cluster(router: Router) -> Tell:
    """What a supervisor tells, done to a router of this process. Called on the router's event loop."""
    loop, follower = asyncio.get_running_loop(), Follower(router)

    def tell(groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended, and its requests with it
            loop.call_soon_threadsafe(follower.apply, groups, draining)

    return tell
