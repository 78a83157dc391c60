"""What keeps a Ray of our own to this machine and this user: its environment, its token file, its folder.

Imports no Ray: Ray reads the environment when it is imported, its processes when they start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import structlog

from disagg.core.errors import ConfigError
from disagg.core.folders import private_folder

log = structlog.get_logger(__name__)

LOOPBACK_ENV = {
    # Ray resolves a node's address to the one that other hosts see; with this off it takes 127.0.0.1, and then all of
    # its servers listen there only. (`ray.init(_node_ip_address="127.0.0.1")` is resolved like any other.)
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # No ports: the metrics servers of the monitor and the dashboard, which ask nobody for a key, stay off. Each logs
    # an error to its file.
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # Without tokens every user of this machine could run code in it.
    "RAY_AUTH_MODE": "token",
}
"""Of a Ray that is started here, not of one that is joined."""
TOKEN_BYTES = 32
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def loopback_env() -> Iterator[None]:
    """Sets `LOOPBACK_ENV` in the block, also against what the operator set."""
    before = {name: os.environ.get(name) for name in LOOPBACK_ENV}
    os.environ.update(LOOPBACK_ENV)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def session_folder() -> Iterator[Path]:
    """A folder for Ray's sockets and logs that only this user can enter, removed at the end.

    It stays, and the log says where, when the block ends with an error that Ray's logs may explain. Raises
    `ConfigError` where none can be made.
    """
    # Ray lets everybody into the folder that it is given: so it gets one within a private one.
    outer = private_folder("ray")
    keep = False
    try:
        yield outer / "r"
    except Exception as exc:
        keep = not isinstance(exc, ConfigError)
        raise
    finally:
        if keep:
            log.warning("ray_logs_kept", folder=str(outer), reason="the cluster ended with an error")
        else:
            shutil.rmtree(outer, ignore_errors=True)


def ensure_token() -> None:
    """Makes Ray's token file, `~/.ray/auth_token`, unless the environment names a token: Ray makes it readable for
    all. One of this user that others may read is closed to them.

    Raises `ConfigError` where it cannot be made.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return
    path = Path("~/.ray/auth_token").expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            _close_to_others(path)
            return
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
    except OSError as exc:
        raise ConfigError(
            f"cannot write Ray's token file {path}: {exc.strerror}; set HOME to a folder that is writable, or "
            f"RAY_AUTH_TOKEN_PATH to a file with a token"
        ) from exc


def _close_to_others(path: Path) -> None:
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & _OTHERS:
        path.chmod(0o600)
        log.warning("ray_token_closed", file=str(path), reason="other users could read it; make a new one")
