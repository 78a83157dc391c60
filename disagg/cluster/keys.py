"""Chooses the control channel's keys for a process: the keys in `control.key_file`, or new keys for each run.

The process that starts a cluster passes the keys to the ranks. A process that joins a cluster reads the configured
key file. If none is configured, a process on the same host reads the file that `disagg launch` writes at its start
and removes at its end.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Mapping
from pathlib import Path

from disagg.core.config.read import ControlConfig
from disagg.core.errors import ConfigError
from disagg.core.folders import cache_folder
from transport.hosts import is_loopback, own_host
from transport.keys.curve import make_keys
from transport.keys.file import load_keys, replace_keys
from transport.keys.ring import KeyRing

_MEND = "make them with `disagg keys FILE`, copy the file to every host, and set control.key_file to it"


def own_keys(config: ControlConfig) -> KeyRing:
    """Returns the keys of a cluster whose processes are all started by this process.

    Raises `ConfigError` for a key file that cannot be used.
    """
    return KeyRing.follow(config.key_file) if config.key_file else KeyRing(make_keys())


def launch_keys(config: ControlConfig, adopting: Mapping[str, str] | None = None) -> KeyRing:
    """Returns the keys of a cluster that other routers join.

    `adopting`: the environment of this process if it may adopt groups; else None. Without `control.key_file`, the
    groups of a killed launch still have the keys that it published, so these keys are returned if they exist. Raises
    `ConfigError` for a key file that cannot be used, and if `control.host` is not loopback and no key file is set.
    """
    if not config.key_file:
        _refuse_beyond_loopback(own_host(config.host))
        if adopting is not None:
            with contextlib.suppress(ConfigError):  # no such file: the last launch has removed it
                return KeyRing(load_keys(run_file(str(config.directory_port), adopting)))
    return own_keys(config)


def join_keys(config: ControlConfig, directory: str, environment: Mapping[str, str]) -> KeyRing:
    """Returns the keys of the cluster whose directory listens at `directory`, `tcp://HOST:PORT`.

    Raises `ConfigError` as `launch_keys` does, and if no `disagg launch` of this user has published keys for that
    address.
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
    """Within the block, keeps the keys in a file for this user's other processes, unless a key file is configured.

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
        # The directory still holds its port here. A later removal could hit the file of the next launch.
        file.unlink(missing_ok=True)


def run_file(port: str, environment: Mapping[str, str]) -> Path:
    """Returns the key file of a `disagg launch` run; its name contains the host, because hosts may share a home."""
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
