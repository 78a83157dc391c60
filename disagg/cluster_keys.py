"""Which keys a process of a cluster uses: those of `control.key_file`, or fresh ones of each run.

Processes that are started together are handed the keys. Those that are started one by one read a file: the configured
one or, on one host, the file that `disagg launch` writes for its run and removes at its end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from disagg.core.config import ControlConfig
from disagg.core.errors import ConfigError
from disagg.core.folders import cache_folder
from transport.hosts import is_loopback, own_host
from transport.key_file import replace_keys
from transport.key_ring import KeyRing
from transport.keys import make_keys

_MEND = "make them with `disagg keys FILE`, copy the file to every host, and set control.key_file to it"


def own_keys(config: ControlConfig) -> KeyRing:
    """For a cluster whose processes are all started from here.

    Raises `ConfigError` for a key file that cannot be used.
    """
    return KeyRing.follow(config.key_file) if config.key_file else KeyRing(make_keys())


def launch_keys(config: ControlConfig) -> KeyRing:
    """For a cluster that routers elsewhere join.

    Raises `ConfigError` for a key file that cannot be used, and without one when `control.host` is beyond loopback.
    """
    if not config.key_file:
        _refuse_beyond_loopback(own_host(config.host))
    return own_keys(config)


def join_keys(config: ControlConfig, directory: str, environment: Mapping[str, str]) -> KeyRing:
    """For a process that joins the cluster whose directory listens at `directory`, `tcp://HOST:PORT`.

    Raises `ConfigError` as `launch_keys`, and when no `disagg launch` of this user published keys for that address.
    """
    if config.key_file:
        return KeyRing.follow(config.key_file)
    host, _, port = directory.removeprefix("tcp://").rpartition(":")
    _refuse_beyond_loopback(own_host(config.host), host)
    file = run_file(port, environment)
    if not file.is_file():
        raise ConfigError(
            f"there are no keys for {directory}: is `disagg launch` of this user running there without "
            f"control.key_file? Otherwise set control.key_file to the file that it uses"
        )
    return KeyRing.follow(file)


@contextlib.contextmanager
def published(
    keys: KeyRing, config: ControlConfig, directory: str, environment: Mapping[str, str]
) -> Iterator[None]:
    """Without a configured key file: within the block, processes of this user find the keys by `directory`'s port.

    Raises `ConfigError` when the file cannot be written.
    """
    if config.key_file:
        yield
        return
    file = run_file(directory.rpartition(":")[2], environment)
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"cannot make {file.parent} for this run's keys: {exc.strerror}") from exc
    replace_keys(keys.keys, file)
    try:
        yield
    finally:
        file.unlink(missing_ok=True)  # before the port is free: the file is not the next launch's


def run_file(port: str, environment: Mapping[str, str]) -> Path:
    """Where `disagg launch` keeps the keys of its run. Hosts may share a home, so the name has the host's."""
    try:
        folder = cache_folder(environment)
    except RuntimeError as exc:
        raise ConfigError(
            f"the user has no home for this run's keys ({exc}): set control.key_file (`disagg keys FILE`)"
        ) from exc
    return folder / "run" / f"control-{socket.gethostname()}-{port}.json"


def _refuse_beyond_loopback(*hosts: str) -> None:
    beyond = [host for host in hosts if not is_loopback(host)]
    if beyond:
        raise ConfigError(
            f"{beyond[0]} is reached by other hosts, so the control channel needs keys that all of them have: {_MEND}"
        )
