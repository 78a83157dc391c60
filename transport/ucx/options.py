"""UCX settings for each `Reach`. These settings override UCX's environment variables and configuration files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import structlog

from disagg.core.errors import ConfigError
from transport.ucx.reach import Reach

log = structlog.get_logger(__name__)

SHM = Path("/dev/shm")
SHM_LEAST_BYTES = 16 << 20
"""Smallest free space in /dev/shm with which a rank can start UCX over shared memory."""

# Receivers pull large messages, because a fenced sender must not be able to write. By default UCX may let the
# sender write; such a write was observed after the receiver's fence (one H200, both ends in one process). UCX
# reads through CUDA IPC only if it detects NVLink, which a virtual machine may hide.
_PULL = {"RNDV_SCHEME": "get_zcopy", "CUDA_IPC_ENABLE_GET_ZCOPY": "on"}

_SHARED_MEMORY = {
    # sysv is omitted: its segments are accessible to the user's group (mode 0660). posix uses unlinked files
    # of mode 0600, passed on as /proc/PID/fd/N.
    "TLS": "posix,cma,cuda",
    "POSIX_USE_PROC_LINK": "y",
    "POSIX_ERROR_HANDLING": "y",
    # With cma, large messages bypass the receiver's queue. A sender killed while it writes to that queue blocks the
    # queue for all other senders: 8 of 25 kills in a bulk transfer without cma, 0 of 105 with it.
    "CMA_MEMORY_INVALIDATE": "y",
    "RNDV_SCHEME": "get_zcopy",
    # A process of another user can send an empty datagram to the wake-up socket of posix. UCX aborts the
    # process when it reads the datagram on an inactive interface, and reports an error on an active one.
    "ADAPTIVE_PROGRESS": "n",
    "KEEPALIVE_INTERVAL": "1s",
}


def options(reach: Reach, *, gpu: bool, interface: str = "") -> dict[str, str]:
    """Returns the settings for `UcxTransport`. `gpu`: whether the transferred bytes lie on GPUs."""
    pull = _PULL if gpu else {}
    if reach is Reach.ONE_HOST:
        return {**_SHARED_MEMORY, **pull}
    if reach is Reach.RDMA:
        return {"TLS": "ib,cuda", **pull}
    return {"TLS": "tcp,cuda", "NET_DEVICES": interface, **pull}


def prepare_host(reach: Reach, environment: Mapping[str, str], shm: Path = SHM) -> None:
    """Logs a warning if the environment sets UCX_TLS, which has no effect. Raises `ConfigError` when /dev/shm is too
    small for the reach."""
    wanted = environment.get("UCX_TLS")
    if wanted is not None:
        ours = options(reach, gpu=False)["TLS"]
        log.warning("ucx_tls_ignored", UCX_TLS=wanted, used=ours, because="transport.backend chooses them")
    if reach is Reach.ONE_HOST:
        _check_shm(shm)


def _check_shm(shm: Path) -> None:
    try:
        found = os.statvfs(shm)
    except OSError as exc:
        raise ConfigError(f"UCX needs shared memory in {shm}: {exc.strerror}") from exc
    free_bytes = found.f_bsize * found.f_bavail
    if free_bytes < SHM_LEAST_BYTES:
        raise ConfigError(
            f"{shm} has {free_bytes >> 20} MiB free; UCX needs {SHM_LEAST_BYTES >> 20} MiB to start, and about 5 MiB "
            "for each rank. Enlarge it: `docker run --shm-size=1g`; in Kubernetes, a larger sizeLimit of the volume "
            "`shm`. Or set transport.backend = tls"
        )
