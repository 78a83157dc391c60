"""Creates a data-plane transport by the name of its backend, which is imported only on this call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

from disagg.core.errors import ConfigError
from transport.base import Transport
from transport.ucx.reach import Reach

if TYPE_CHECKING:
    from transport.inproc import InprocFabric
    from transport.keys.ring import KeyRing

TRANSPORTS = ("inproc", "ucx", "tls")
"""Names accepted by `make_transport`."""


@dataclass(frozen=True, slots=True)
class TLSOptions:
    """Arguments of the `tls` backend."""

    keys: KeyRing
    host: str = "127.0.0.1"
    """Address to listen on."""
    lanes: int = 0
    """Connections per peer for a large message; see `transport.tls_lanes` of the configuration."""


def make_transport(
    name: str,
    *,
    rank_name: str = "",
    fabric: InprocFabric | None = None,
    gpu: bool = False,
    reach: Reach = Reach.ONE_HOST,
    interface: str = "",
    tls: TLSOptions | None = None,
) -> Transport:
    """Creates a transport of the backend `name`, owned by the calling thread. `transport.reach.choose` picks
    the backend.

    `inproc` needs `rank_name` and `fabric`; `tls` needs `tls`. `gpu` (whether the transferred bytes lie on GPUs),
    `reach` and `interface` are for `ucx`.

    Raises `ConfigError` for an unknown name, or when the backend cannot be used on this host.
    """
    if name == "ucx":
        from transport.ucx.options import options, prepare_host
        from transport.ucx.transport import UcxTransport

        prepare_host(reach, os.environ)
        return UcxTransport(options(reach, gpu=gpu, interface=interface))
    if name == "inproc":
        if fabric is None or not rank_name:
            raise ConfigError("transport inproc needs a fabric and a rank_name; across processes use ucx")
        from transport.inproc import InprocTransport

        return InprocTransport(fabric, rank_name)
    if name == "tls":
        if tls is None:
            raise ConfigError("transport tls needs the cluster's keys; make them with `disagg keys`")
        from transport.tls.transport import TlsTransport

        return TlsTransport(tls.host, tls.keys, tls.lanes)
    raise ConfigError(f"unknown transport {name!r}; choose one of {', '.join(TRANSPORTS)}")
