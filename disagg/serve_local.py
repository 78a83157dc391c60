"""A cluster on this machine and a router in this process: what `disagg demo`, `generate` and `serve` run on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch

from disagg.cluster import Cluster, Progress, local_ray, start_cluster
from disagg.core.config import Config
from disagg.core.errors import ConfigError, UnsupportedModelError
from disagg.model.source import ModelSource
from disagg.model.tp import query_span
from disagg.node.assemble import make_source
from disagg.placement import Placement, choose_placement
from disagg.router.mail import MailRoom
from disagg.router.policy import POLICIES
from disagg.router.session import Router
from transport.control_zmq import make_control
from transport.keys import load_keys, make_keys

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
    for role, group in (("prefill", placement.prefill), ("decode", placement.decode)):
        try:
            query_span(spec, 0, group.tp)
        except UnsupportedModelError as exc:
            raise UnsupportedModelError(f"{role}.tp = {group.tp}: {exc}") from exc


def load_tokenizer(source: ModelSource) -> Any:
    """The checkpoint's tokenizer; one token per byte for random weights. Raises `ConfigError` without one."""
    if source.directory is None:
        from disagg.model.tiny import byte_tokenizer

        return byte_tokenizer()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(source.directory, local_files_only=True)
    except (OSError, ValueError) as exc:
        raise ConfigError(f"{source.directory} has no tokenizer that transformers can load: {exc}") from exc


def limit_tokens(config: Config, source: ModelSource) -> int:
    """Tokens that a prompt and its answer may have together: the model's and both pools'."""
    context = source.spec(torch.float32).context_tokens
    return min(context, config.prefill.max_context_tokens, config.decode.max_context_tokens)


@contextlib.contextmanager
def local_cluster(config: Config, progress: Progress) -> Iterator[Cluster]:
    """Ray and both groups, ready to serve; all gone at the end. A TP size of None is chosen from the machine."""
    source = make_source(config)
    placement = place(config)
    make_control(
        config.control, None, config.control.router_port
    ).close()  # in use? Said before all is loaded.
    progress(f"placement: {placement.why}")
    check_split(source, placement)
    progress("starting Ray")
    keys = load_keys(config.control.key_file) if config.control.key_file else make_keys()
    with local_ray(placement.ranks), start_cluster(config, placement, keys, progress) as cluster:
        yield cluster


def place(config: Config) -> Placement:
    """Where both groups run on this machine. Raises `ConfigError` when one must have a GPU and the other must not."""
    devices = {config.prefill.device, config.decode.device}
    if devices == {"cpu", "cuda"}:
        raise ConfigError(
            f"prefill.device = {config.prefill.device} and decode.device = {config.decode.device}: both groups run "
            f"on the same kind of device; set both to one, or one to auto"
        )
    device = (devices - {"auto"} or {"auto"}).pop()
    return choose_placement(
        torch.cuda.device_count(),
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
        yield Router(
            mail,
            cluster.infos(),
            reserve_retry_s=cluster.config.router.reserve_retry_s,
            choose=POLICIES[cluster.config.router.policy],
        )
    finally:
        mail.close()
