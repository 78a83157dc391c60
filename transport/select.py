"""Choice of a data plane by name. Backends are imported only when chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.core.errors import ConfigError
from transport.base import Transport

if TYPE_CHECKING:
    from transport.inproc import InprocFabric

TRANSPORTS = ("inproc", "ucx")
"""Names that `make_transport` knows."""


def make_transport(
    name: str,
    *,
    rank_name: str = "",
    fabric: InprocFabric | None = None,
    error_handling: bool = True,
) -> Transport:
    """A transport of the backend `name`, owned by the calling thread.

    `rank_name` and `fabric` are for `inproc` (both needed); `error_handling` is for `ucx`. Raises
    `ConfigError` for an unknown name or when the backend cannot be used here.
    """
    if name == "ucx":
        from transport.ucx import UcxTransport

        return UcxTransport(error_handling=error_handling)
    if name == "inproc":
        if fabric is None or not rank_name:
            raise ConfigError("transport inproc needs a fabric and a rank_name; across processes use ucx")
        from transport.inproc import InprocTransport

        return InprocTransport(fabric, rank_name)
    raise ConfigError(f"unknown transport {name!r}; choose one of {', '.join(TRANSPORTS)}")
