"""Choice of a data plane by name. Backends are imported only when chosen."""

from __future__ import annotations

from typing import TYPE_CHECKING

from disagg.core.errors import ConfigError
from transport.base import Transport

if TYPE_CHECKING:
    from transport.inproc import InprocFabric

# UCX reads through CUDA IPC only where it sees NVLink, which a virtual machine may hide; the scheme alone then
# sends GPU memory over TCP, and such a message cannot be fenced when its sender dies in the middle of it.
PULL = {"RNDV_SCHEME": "get_zcopy", "CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
TRANSPORTS = ("inproc", "ucx")
"""Names that `make_transport` knows."""


def make_transport(
    name: str,
    *,
    rank_name: str = "",
    fabric: InprocFabric | None = None,
    error_handling: bool = True,
    gpu: bool = False,
) -> Transport:
    """A transport of the backend `name`, owned by the calling thread.

    `rank_name` and `fabric` are for `inproc` (both needed); `error_handling` and `gpu` (what is moved lies on GPUs)
    are for `ucx`. Raises `ConfigError` for an unknown name or when the backend cannot be used here.
    """
    if name == "ucx":
        from transport.ucx import UcxTransport

        # Large messages from GPU to GPU are pulled by their receiver. Left to choose, UCX may let the sender write,
        # and such a write was seen to land after the receiver had fenced it (one H200, both ends in one process).
        return UcxTransport(error_handling=error_handling, options=PULL if gpu else None)
    if name == "inproc":
        if fabric is None or not rank_name:
            raise ConfigError("transport inproc needs a fabric and a rank_name; across processes use ucx")
        from transport.inproc import InprocTransport

        return InprocTransport(fabric, rank_name)
    raise ConfigError(f"unknown transport {name!r}; choose one of {', '.join(TRANSPORTS)}")
