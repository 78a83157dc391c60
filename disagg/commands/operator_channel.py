"""Control channel of an operator's command (`disagg scale`, `disagg roll`) to the directory of a `disagg launch`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from disagg.cluster.directory import directory_host
from disagg.cluster.keys import join_keys
from disagg.core.config.read import Config
from disagg.core.log import configure
from transport.control.base import ControlChannel
from transport.control.zmq import make_control


@contextmanager
def operator_channel(config: Config, directory: str) -> Iterator[ControlChannel]:
    """Configures the log, and yields a channel that can reach `directory`; the caller starts it, the block closes it.

    Raises `ConfigError` for a malformed address, and if the keys of the directory cannot be found.
    """
    configure(config.log)
    directory_host(directory, config.control)  # rejects a malformed address
    control = make_control(config.control, join_keys(config.control, directory, os.environ))
    try:
        yield control
    finally:
        control.close(linger_s=0.2)
