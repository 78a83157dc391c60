"""Which backend a rank uses, and over which kind of link, decided from the configuration and the rank's host.

The decision is a matter of security: UCX's TCP transport has no authentication and executes memory writes for its
peers. Only `Reach.TCP` opens a TCP port for UCX, and only `transport.trusted_network` leads to it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from disagg.core.config_tree import TransportConfig
from disagg.core.errors import ConfigError
from transport.hosts import interface_of, is_loopback

_RDMA_DEVICES = Path("/sys/class/infiniband")
_DANGER = (
    "UCX over TCP has no authentication: a machine that reaches its port can read and write a rank's memory"
)


class Reach(enum.Enum):
    """The links that UCX may use."""

    ONE_HOST = "shm"
    """Shared memory and CUDA IPC, between processes of one user on one host. No TCP port."""
    RDMA = "rdma"
    """RDMA devices and CUDA IPC. No TCP port."""
    TCP = "tcp"
    """TCP on one interface, and CUDA IPC. For a trusted network."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A backend for one rank; `make_transport` takes it apart."""

    backend: Literal["ucx", "tls", "inproc"]
    reason: str
    """Why, as the end of a sentence, for logs and `disagg doctor`."""
    reach: Reach = Reach.ONE_HOST
    """For `ucx` only."""
    interface: str = ""
    """Network interface that `Reach.TCP` is limited to."""

    @property
    def name(self) -> str:
        """Word for the handshake: two groups exchange KV only if it is the same for both."""
        return f"ucx-{self.reach.value}" if self.backend == "ucx" else self.backend


@dataclass(frozen=True, slots=True)
class Probes:
    """What the decision asks of the machine; tests put answers here."""

    rdma: Callable[[], str]
    """Why UCX cannot use RDMA here; empty if it can."""
    one_host: Callable[[], str]
    """Why UCX cannot use shared memory here; empty if it can."""


def choose(config: TransportConfig, host: str, probes: Probes | None = None) -> Choice:
    """The backend for a rank whose control channel listens on `host` (resolved, not `auto`).

    Raises `ConfigError` when `transport.backend` cannot be used there safely, with the settings that mend it.
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
    """Why UCX cannot use RDMA on this host; empty if it can."""
    names = sorted(entry.name for entry in _RDMA_DEVICES.iterdir()) if _RDMA_DEVICES.is_dir() else []
    if not names:
        return "this host has no RDMA device"
    from transport.ucx_library import offers

    if not offers("ib"):
        return f"the UCX library has no transport for the RDMA devices of this host ({', '.join(names)})"
    return ""


def why_no_shared_memory() -> str:
    """Why UCX cannot use shared memory on this host; empty if it can."""
    from transport.ucx_library import offers

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
