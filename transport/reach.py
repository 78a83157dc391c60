"""Chooses a rank's transport backend and its kind of link, from the configuration and the host.

The choice matters for security: UCX's TCP transport has no authentication and executes memory writes for its peers.
Only `Reach.TCP` opens a TCP port for UCX; this choice requires `transport.trusted_network`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg.core.config.transfer import TransportConfig
from disagg.core.errors import ConfigError
from transport.hosts import interface_of, is_loopback
from transport.ucx.reach import Reach

RDMA_DEVICES = Path("/sys/class/infiniband")
_DANGER = (
    "UCX over TCP has no authentication: a machine that reaches its port can read and write a rank's memory"
)


@dataclass(frozen=True, slots=True)
class Choice:
    """The backend of one rank: arguments of `make_transport`."""

    backend: Literal["ucx", "tls", "inproc"]
    reason: str
    """Reason of the choice, for logs and `disagg doctor`."""
    reach: Reach = Reach.ONE_HOST
    """Kind of link, for `ucx` only."""
    interface: str = ""
    """Network interface of `Reach.TCP`."""

    @property
    def name(self) -> str:
        """Name in the handshake. Two groups exchange KV only if their names are equal."""
        return f"ucx-{self.reach.value}" if self.backend == "ucx" else self.backend


@dataclass(frozen=True, slots=True)
class Probes:
    """Functions that query the machine for `choose`; tests replace these functions."""

    rdma: Callable[[], str]
    """Returns why UCX cannot use RDMA on this host; empty if it can."""
    one_host: Callable[[], str]
    """Returns why UCX cannot use shared memory on this host; empty if it can."""


def choose(config: TransportConfig, host: str, probes: Probes | None = None) -> Choice:
    """Returns the backend for a rank whose control channel listens on `host` (resolved, not `auto`).

    Raises `ConfigError`, which names the settings to change, when `transport.backend` is not safe on that host.
    """
    if config.backend == "inproc":
        return Choice("inproc", "transport.backend is inproc")
    if config.backend == "tls":
        return Choice("tls", "transport.backend is tls")
    probes = probes or Probes(why_no_rdma, why_no_shared_memory)
    choice = _on_one_host(host, probes) if is_loopback(host) else _between_hosts(config, host, probes)
    if choice.backend == "tls" and config.backend == "ucx":
        raise ConfigError(_refusal(host, choice.reason))
    return choice


def why_no_rdma() -> str:
    """Returns why UCX cannot use RDMA on this host; empty if it can."""
    names = sorted(entry.name for entry in RDMA_DEVICES.iterdir()) if RDMA_DEVICES.is_dir() else []
    if not names:
        return "this host has no RDMA device"
    from transport.ucx.library import offers

    if not offers("ib"):
        return f"the UCX library has no transport for the RDMA devices of this host ({', '.join(names)})"
    return ""


def why_no_shared_memory() -> str:
    """Returns why UCX cannot use shared memory on this host; empty if it can."""
    from transport.ucx.library import offers

    if not offers("cma"):
        return (
            "processes may not read each other's memory (process_vm_readv): kernel.yama.ptrace_scope is above 1, or "
            "the seccomp profile of the container forbids it"
        )
    return ""


def _on_one_host(host: str, probes: Probes) -> Choice:
    missing = probes.one_host()
    if missing:
        return Choice("tls", missing)
    return Choice("ucx", f"control.host {host} is loopback: shared memory and CUDA IPC, no TCP port")


def _between_hosts(config: TransportConfig, host: str, probes: Probes) -> Choice:
    no_rdma = probes.rdma()
    if not no_rdma:
        return Choice("ucx", "UCX has RDMA devices here; no TCP port", Reach.RDMA)
    if not config.trusted_network:
        return Choice("tls", f"{no_rdma}, and transport.trusted_network is false")
    interface = interface_of(host)
    reason = f"{no_rdma}, and transport.trusted_network is true: TCP without authentication on {interface}"
    return Choice("ucx", reason, Reach.TCP, interface)


def _refusal(host: str, reason: str) -> str:
    if is_loopback(host):
        return (
            f"transport.backend = ucx cannot be used with control.host = {host}: {reason}. Set transport.backend to "
            "auto or tls, set kernel.yama.ptrace_scope to 0 or 1, or allow process_vm_readv in the container"
        )
    return (
        f"transport.backend = ucx cannot be used with control.host = {host}: {reason}. {_DANGER}. Set "
        "transport.backend to auto or tls, use hosts and an image with RDMA, or set transport.trusted_network = true "
        "if every machine that reaches this network is trusted"
    )
