"""A private Ray cluster: restricted to this machine and this user, and ended together with the command.

This module does not import Ray, because Ray reads the environment when it is imported. Ray's processes read the
environment when they start.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import structlog

from disagg.cluster import guard
from disagg.core.errors import ConfigError
from disagg.core.folders import create_file, private_folder

log = structlog.get_logger(__name__)

LOOPBACK_ENV = {
    # Ray resolves a node's address to its external address, even with `ray.init(_node_ip_address="127.0.0.1")`. With
    # this value Ray uses 127.0.0.1, and all of its servers listen only there.
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    # A process that sets its title would overwrite its environment, by which the guard finds Ray's processes.
    "SPT_NOENV": "1",
    # Otherwise Ray starts an idle worker for each core before any rank needs one.
    "RAY_prestart_worker_first_driver": "0",
    # Without tokens every user of this machine could run code in this Ray.
    "RAY_AUTH_MODE": "token",
}
"""Environment variables of a private Ray. They are not used for an existing Ray cluster."""
TOKEN_BYTES = 32
SERVERS = ("gcs_server", "raylet")
"""Names of the Ray processes without which no rank can start. If the raylet ends, Ray declares the ranks dead."""
_OTHERS = stat.S_IRWXG | stat.S_IRWXO


@contextlib.contextmanager
def loopback_env() -> Iterator[None]:
    """Sets the variables of `LOOPBACK_ENV` within the block, over those of the operator's environment."""
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


class PrivateRay:
    """The processes of a private Ray cluster. Thread-safe."""

    def __init__(self, mark: str, folder: Path) -> None:
        self._mark, self._folder = mark, folder
        self._servers: dict[str, psutil.Process] = {}

    def started(self) -> None:
        """Finds Ray's servers among the children of this process, so that `failure` can watch them."""
        children = psutil.Process().children()
        self._servers = {one.name(): one for one in children if one.name() in SERVERS}

    @property
    def logs(self) -> Path:
        """Folder of Ray's logs, which include the output of each rank."""
        return self._folder / "r" / "session_latest" / "logs"

    def failure(self) -> str:
        """Returns a sentence that names the Ray server that has ended; empty while all run."""
        for name, server in self._servers.items():
            try:
                ended = server.status() == psutil.STATUS_ZOMBIE or not server.is_running()
            except psutil.NoSuchProcess:
                ended = True
            if ended:
                return f"Ray's {name} (pid {server.pid}) has ended"
        return ""

    def kill(self) -> None:
        """Kills every process of this Ray: ranks, servers, agents."""
        guard.kill_all(self._mark, str(self._folder), os.getpid())


@contextlib.contextmanager
def guarded(folder: Path) -> Iterator[PrivateRay]:
    """Marks the processes that start within the block. At its end, a guard process kills the marked processes.

    If this process is killed, the guard kills the marked processes too, and removes `folder`.
    """
    mark = secrets.token_hex(16)
    process = None
    if sys.platform == "linux":  # the guard reads /proc
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, mark, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal must not end the guard
        )
    os.environ[guard.MARK] = mark
    try:
        yield PrivateRay(mark, folder)
    finally:
        os.environ.pop(guard.MARK, None)
        if process is not None:
            with contextlib.suppress(OSError):  # the guard was killed
                process.communicate(guard.CLEAN)


@contextlib.contextmanager
def session_folder() -> Iterator[Path]:
    """Makes a folder for Ray's sockets and logs that only this user can enter; removes it at the end of the block.

    After an error that Ray's logs may explain (not a `ConfigError`), the folder stays and its path is logged. Raises
    `ConfigError` when the folder cannot be made.
    """
    # Ray gives all users access to its folder, so this folder lies within a private one.
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


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Restores the signal handlers at the end of the block, because `ray.init` replaces the handler of SIGTERM.

    Ray's handler raises `SystemExit`. This context manager raises `KeyboardInterrupt` in its place.
    """
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except SystemExit as exc:
        raise KeyboardInterrupt from exc
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


def ensure_token() -> None:
    """Makes Ray's token file, `~/.ray/auth_token`, readable for this user only.

    Ray itself would make the file readable for all users. If the file exists and belongs to this user, other users
    lose access. If the environment has a token, or `RAY_AUTH_MODE` is not `token`, the function does nothing. Raises
    `ConfigError` when the file cannot be made.
    """
    if os.environ.get("RAY_AUTH_TOKEN") or os.environ.get("RAY_AUTH_TOKEN_PATH"):
        return
    if os.environ.get("RAY_AUTH_MODE") != "token":
        return
    path = Path("~/.ray/auth_token").expanduser()
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not path.exists():
            # Another start may have made the file in the meantime: both starts use its token.
            with contextlib.suppress(FileExistsError):
                create_file(path, secrets.token_hex(TOKEN_BYTES).encode())
                return
        _close_to_others(path)
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
