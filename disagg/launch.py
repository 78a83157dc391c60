"""`disagg launch`: groups and their directory, for routers elsewhere."""

from __future__ import annotations

import os
import threading

import structlog
from rich.console import Console

from disagg.cluster_keys import launch_keys, published
from disagg.core.config import Config
from disagg.core.log import configure
from disagg.directory import Directory
from disagg.serve_local import placed_cluster, with_model
from disagg.signals import handlers_restored, ignore_signals, on_signal
from disagg.sockets.guards import log_own_sockets
from disagg.supervisor import supervised
from transport.control_zmq import make_control

log = structlog.get_logger(__name__)

GROWTH = 2
"""A Ray that `launch` starts takes so many times the groups of the start; a cluster that runs already has its own."""


def run_launch(config: Config) -> None:
    """Starts the groups and tells routers of them until SIGINT or SIGTERM; a second one cuts the drain short.

    Routers are told first, and have `transfer.drain_timeout_s` to end what they run. Raises `ConfigError` for what
    cannot be used before anything starts, `KeyboardInterrupt` for a signal that comes before the groups are up.
    """
    configure(config.log)
    console = Console(stderr=True)
    keys = launch_keys(config.control)
    config = with_model(config, console.print)
    stop, hurry = threading.Event(), threading.Event()
    with handlers_restored():
        directory = Directory(make_control(config.control, keys, config.control.directory_port))
        directory.start()
        try:
            with (
                published(keys, config.control, directory.address, os.environ),
                console.status("starting") as status,
                placed_cluster(config, keys, status.update, GROWTH) as cluster,
                supervised(cluster, directory.tell, directory.wait_unused) as supervisor,
            ):
                status.stop()
                directory.on_scale(supervisor.scale)
                on_signal(lambda: (hurry if stop.is_set() else stop).set())
                log.info("launched", join=directory.address, groups=[info.name for info in cluster.infos()])
                log_own_sockets(descendants=True)
                stop.wait()
                log.info("stopping", drain_timeout_s=config.transfer.drain_timeout_s)
                if not supervisor.drain(config.transfer.drain_timeout_s, hurry):
                    log.warning("requests_aborted", reason="they did not end in time")
                ignore_signals()  # the cluster's end takes seconds
        finally:
            directory.close()
