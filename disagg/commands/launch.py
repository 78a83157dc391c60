"""`disagg launch`: starts groups and their directory, for routers in other processes."""

from __future__ import annotations

import os
import threading

import structlog
from rich.console import Console

from disagg.cluster.directory import Directory
from disagg.cluster.keys import launch_keys, published
from disagg.cluster.roll import Roller
from disagg.cluster.supervisor import supervised
from disagg.commands.early import check_model, pinned
from disagg.commands.failure import raise_failure
from disagg.commands.local import placed_cluster, with_model
from disagg.commands.signals import END_S, ignore_signals, on_signal, start_interruptible
from disagg.core.config.read import Config
from disagg.core.log import configure
from disagg.sockets.guards import log_own_sockets
from transport.control.zmq import make_control

log = structlog.get_logger(__name__)

GROWTH = 2
"""Capacity of a private Ray, as a multiple of the ranks at the start. The spare capacity is for `disagg scale`."""


OUTLIVING_END_S = 30.0
"""Time from a signal during the start to a forced exit, on an existing Ray cluster. The time is longer than `END_S`,
because groups that are not ended within it outlive the command."""
REMEDY = "remove the cause; `disagg scale` tries again at once"


def run_launch(config: Config) -> None:
    """Starts the groups and announces them to routers until SIGINT or SIGTERM; a second signal skips the drain.

    After the first signal, routers send no new requests, and running requests have `transfer.drain_timeout_s` to
    finish. On an existing Ray cluster, the groups outlive a killed command, and the next launch adopts them. Raises
    `DisaggError` if the whole cluster fails, so that a service manager starts the command again. Raises `ConfigError`
    for bad settings before any process starts, and `KeyboardInterrupt` for a signal during the start.
    """
    configure(config.log)
    console = Console(stderr=True)
    outlives = config.cluster.outlives_launch
    keys = launch_keys(config.control, os.environ if outlives else None)
    config = with_model(config, console.print)
    stop, stop_now = threading.Event(), threading.Event()
    with start_interruptible(OUTLIVING_END_S if outlives else END_S):
        directory = Directory(make_control(config.control, keys, config.control.directory_port))
        directory.start()
        try:
            with (
                published(keys, config.control, directory.address, os.environ),
                console.status("starting") as status,
                placed_cluster(config, keys, status.update, GROWTH, outlives) as cluster,
                supervised(cluster, directory.announce, directory.wait_unused, REMEDY) as supervisor,
            ):
                status.stop()
                directory.on_scale(supervisor.scale)
                roller = Roller(cluster, supervisor, directory, _checked_model)
                directory.on_roll(roller.begin, roller.stop)
                on_signal(lambda: (stop_now if stop.is_set() else stop).set())
                cluster.on_failed(stop.set)
                infos = cluster.infos()
                log.info("launched", join=directory.address, groups=[info.name for info in infos])
                log_own_sockets([rank for info in infos for rank in info.ranks], descendants=True)
                stop.wait()
                raise_failure(cluster)
                log.info("stopping", drain_timeout_s=config.transfer.drain_timeout_s)
                if not supervisor.drain(config.transfer.drain_timeout_s, stop_now):
                    log.warning("requests_aborted", reason="they exceeded transfer.drain_timeout_s")
                ignore_signals()  # the shutdown takes seconds
        finally:
            directory.close()


def _checked_model(config: Config) -> tuple[Config, str]:
    """Returns the configuration with the commit of a model on the hub, and the fingerprint of the model's files.

    May download the model, and may read all weights. Raises `ConfigError` for a model that cannot be loaded.
    """
    from disagg.model.load.source import make_source

    check_model(config.model)
    config = pinned(config)
    return config, make_source(config).fingerprint
