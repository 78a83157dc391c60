"""The collective over `torch.distributed`'s gloo or NCCL backends.

The backend is made directly and not through `init_process_group`: that call has one global group per process,
and libraries that find it set up change their behaviour (transformers shards over it).
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from disagg.core.errors import ConfigError, PeerLostError
from disagg.model.ordered import all_reduce_in_order

BACKENDS = ("gloo", "nccl")

dist: Any = torch.distributed  # its stubs lack the stores and the backends


class TorchCollective:
    """One engine's ranks, one process each (gloo also takes threads).

    nccl wants a GPU of its own for each rank; ranks that share a GPU take gloo, which passes through host
    memory.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        backend: str,
        init_method: str | None = None,
        store: Any | None = None,
        timeout_s: float = 60.0,
        deterministic: bool = False,
    ) -> None:
        """Joins the group; returns when all ranks have. Give `init_method` (`tcp://host:port`) or `store`.

        `deterministic`: an element's sum has the same bits whatever the size of its tensor.
        Raises ConfigError for a wrong argument, PeerLostError when the ranks do not meet within `timeout_s`.
        """
        if backend not in BACKENDS:
            raise ConfigError(f"unknown collective backend {backend!r}; use one of {', '.join(BACKENDS)}")
        if (init_method is None) == (store is None):
            raise ConfigError("a TorchCollective takes either `init_method` or `store`")
        self.rank = rank
        self.size = size
        self.recordable = backend == "nccl"
        self._timeout_s = timeout_s
        # Two ranks' sum has one rounding and no order (a + b is b + a): the backend's own does for them.
        self._in_order = deterministic and size > 2
        timeout = timedelta(seconds=timeout_s)
        try:
            if store is None:
                store, _, _ = next(dist.rendezvous(str(init_method), rank, size, timeout=timeout))
            self._group = _make_group(
                dist.PrefixStore(f"disagg-{backend}", store), rank, size, backend, timeout
            )
        except (RuntimeError, dist.DistError) as exc:
            raise self._lost() from exc
        device = (
            torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")
        )
        self._token = torch.ones(1, device=device)

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In-place sum; with nccl it is queued on the current stream. Raises PeerLostError on a lost rank."""
        try:
            if self._in_order:
                all_reduce_in_order(self._group, tensor, self.size)
            else:
                self._group.allreduce([tensor]).wait()
        except (RuntimeError, dist.DistError) as exc:
            raise self._lost() from exc

    def barrier(self) -> None:
        """Returns when every rank is here. Raises PeerLostError on a lost rank."""
        self.all_reduce(self._token.fill_(1.0))
        if self._token.is_cuda:
            torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Ends this rank's connections; a rank that waits for this one gets PeerLostError."""
        self._group.abort()

    def _lost(self) -> PeerLostError:
        return PeerLostError(
            f"rank {self.rank} of {self.size}: a rank of the group is gone or did not come within "
            f"{self._timeout_s} s; the group must be built again"
        )


def _make_group(store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    if backend == "gloo":
        return dist.ProcessGroupGloo(store, rank, size, timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
