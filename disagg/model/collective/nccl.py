"""The collective over NCCL, by the backend of `torch.distributed`. Each rank has its own GPU; all ranks share a host.

The backend is created directly, not by `init_process_group`, which sets up one global group per process. Libraries
change their behaviour if a global group exists: transformers, for example, then shards models over the group.
"""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from disagg.core.errors import PeerLostError
from disagg.model.collective.base import lost_rank
from disagg.model.collective.ordered import all_reduce_in_order

LOCAL_ONLY = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
"""Environment variables that restrict NCCL's sockets to loopback and disable its status service (`localhost:28028`),
which has no authentication. NCCL's bootstrap port requires a random 64-bit number, which the ranks exchange through
the store."""

dist: Any = torch.distributed  # torch's type stubs lack the stores and the backends


class NcclCollective:
    """Collective of ranks that are processes of one host, each with its own GPU."""

    recordable = True

    def __init__(
        self, *, rank: int, size: int, directory: Path, timeout_s: float = 60.0, deterministic: bool = False
    ) -> None:
        """Joins the group on the current device; returns when all ranks have joined.

        `directory` is the same for all ranks and private to the user (`disagg.core.folders.private_folder`). It holds
        the ranks' store (a file, no port), which NCCL may read while the group exists; the caller removes it
        afterwards. With `deterministic`, the bits of an element's sum do not depend on the tensor's size. Raises
        PeerLostError when not all ranks join within `timeout_s`.
        """
        self.rank = rank
        self.size = size
        self._timeout_s = timeout_s
        # The sum of two ranks has one rounding and no order (a + b is b + a), so the backend's all-reduce is used.
        self._in_order = deterministic and size > 2
        for name, value in LOCAL_ONLY.items():
            os.environ.setdefault(name, value)
        timeout = timedelta(seconds=timeout_s)
        try:
            store = dist.FileStore(str(directory / "store"), size)
            store.set_timeout(timeout)
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self._group = dist.ProcessGroupNCCL(dist.PrefixStore("disagg", store), rank, size, options)
        except (RuntimeError, dist.DistError) as exc:
            raise self._lost() from exc
        self._token = torch.ones(1, device=torch.device("cuda", torch.cuda.current_device()))
        self.barrier()

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums the tensor in place, queued on the current stream. Raises PeerLostError on a lost rank."""
        try:
            if self._in_order:
                all_reduce_in_order(self._group, tensor, self.size)
            else:
                self._group.allreduce([tensor]).wait()
        except (RuntimeError, dist.DistError) as exc:
            raise self._lost() from exc

    def barrier(self) -> None:
        """Returns when every rank has entered. Raises PeerLostError on a lost rank."""
        self.all_reduce(self._token.fill_(1.0))
        torch.cuda.current_stream().synchronize()

    def close(self) -> None:
        """Closes this rank's connections. Ranks that wait for this rank raise PeerLostError."""
        self._group.abort()

    def _lost(self) -> PeerLostError:
        return lost_rank(self.rank, self.size, self._timeout_s)
