"""Choice of a data plane by name. Backends are imported only when chosen."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from disagg.core.errors import ConfigError
from transport.base import Transport
from transport.reach import Reach

if TYPE_CHECKING:
    from transport.inproc import InprocFabric
    from transport.key_ring import KeyRing

TRANSPORTS = ("inproc", "ucx", "tls")
"""Names that `make_transport` knows."""


def make_transport(
    name: str,
    *,
    rank_name: str = "",
    fabric: InprocFabric | None = None,
    gpu: bool = False,
    reach: Reach = Reach.ONE_HOST,
    interface: str = "",
    host: str = "127.0.0.1",
    keys: KeyRing | None = None,
    tls_lanes: int = 0,
) -> Transport:
    """A transport of the backend `name`, owned by the calling thread. `transport.reach.choose` picks the backend.

    `rank_name` and `fabric` are for `inproc` (both needed). `gpu` (the bytes that move lie on GPUs), `reach` and
    `interface` are for `ucx`. `host` (the address to listen on), `keys` (needed) and `tls_lanes` are for `tls`.
    Raises `ConfigError` for an unknown name or when the backend cannot be used here.
    """
    if name == "ucx":
        from transport.ucx import UcxTransport
        from transport.ucx_options import options, prepare_host

        prepare_host(reach, os.environ)
        return UcxTransport(options(reach, gpu=gpu, interface=interface))
    if name == "inproc":
        if fabric is None or not rank_name:
            raise ConfigError("transport inproc needs a fabric and a rank_name; across processes use ucx")
        from transport.inproc import InprocTransport

        return InprocTransport(fabric, rank_name)
    if name == "tls":
        if keys is None:
            raise ConfigError("transport tls needs the cluster's keys; make them with `disagg keys`")
        from transport.tls import TlsTransport

        return TlsTransport(host, keys, tls_lanes)
    raise ConfigError(f"unknown transport {name!r}; choose one of {', '.join(TRANSPORTS)}")
