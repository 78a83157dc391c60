"""The collective of ranks on one host that have no GPU each: shared memory for the terms, unix sockets for the order.

Each rank writes its part, waits until every rank has, and adds all parts in rank order. Two halves of the memory
alternate: a rank writes a half again after the next sum's exchange, which no rank enters before it has read the half.
So one exchange for each sum suffices.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
import threading
import time
from pathlib import Path

import torch

from disagg.core.errors import PeerLostError
from disagg.model.collective.base import lost_rank
from disagg.model.collective.local_meeting import meet
from kernels.layers.rank_sum import rank_sum

PART_BYTES = 1 << 20
"""A rank's part of one sum. Larger tensors are summed part by part."""
_TOKEN = b"."
_TOKENS = 64
"""More than a rank can be ahead of another one, which is one exchange."""


class SharedCollective:
    """One engine's ranks on one host: processes or threads of one user, on CPUs or sharing GPUs.

    GPU tensors pass through host memory, on the current stream, which is synchronized. Sums are `rank_sum`'s: an
    element has the same bits on every rank and in a tensor of any size.
    """

    recordable = False

    def __init__(self, *, rank: int, size: int, directory: Path, timeout_s: float = 60.0) -> None:
        """Joins the group; returns when all ranks have. `directory` is the same for all, empty, and private to the
        user (`disagg.core.folders.private_folder`).

        Raises PeerLostError when the ranks do not meet within `timeout_s`, which also bounds each later exchange.
        """
        self.rank, self.size = rank, size
        self._timeout_s = timeout_s
        memory_bytes = 2 * size * PART_BYTES
        try:
            met = meet(directory, rank, size, memory_bytes, timeout_s)
        except OSError as exc:
            raise self._lost() from exc
        try:
            self._mapped = mmap.mmap(met.memory_fd, memory_bytes)
        finally:
            os.close(met.memory_fd)
        self._memory = torch.frombuffer(self._mapped, dtype=torch.uint8)
        self._half = 0
        self._peers = dict(met.peers)
        self._ranks = {peer.fileno(): number for number, peer in self._peers.items()}
        self._poll = select.poll()
        for peer in self._peers.values():
            peer.setblocking(False)
            self._poll.register(peer, select.POLLIN)
        self._round = 0
        self._rounds = dict.fromkeys(self._peers, 0)
        """Exchanges that each other rank has entered."""
        self._busy = threading.Lock()
        """Held while the sockets are used: `close` of another thread frees them afterwards."""
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """In-place sum of a contiguous tensor. Raises PeerLostError when a rank closed or did not come in time."""
        assert tensor.is_contiguous(), "what ranks compute for a sum is contiguous"
        flat, elements = tensor.view(-1), PART_BYTES // tensor.itemsize
        for start in range(0, flat.numel(), elements):
            self._sum(flat[start : start + elements])

    def barrier(self) -> None:
        """Returns when every rank is here. Raises PeerLostError when one closed or did not come in time."""
        with self._busy:
            try:
                self._exchange()
            except OSError as exc:
                self._hang_up()
                raise self._lost() from exc

    def close(self) -> None:
        """Ends this rank's connections, also from another thread; a rank that waits for it gets PeerLostError."""
        self._hang_up()
        with self._busy:
            for peer in self._peers.values():
                peer.close()

    def _sum(self, part: torch.Tensor) -> None:
        half = self._memory[self._half * self.size * PART_BYTES :][: self.size * part.nbytes]
        parts = half.view(part.dtype).view(self.size, part.numel())
        self._half ^= 1
        parts[self.rank].copy_(part)
        self.barrier()
        if part.is_cuda:
            total = torch.empty_like(parts[0])
            rank_sum(parts, total)
            part.copy_(total)
        else:
            rank_sum(parts, part)

    def _exchange(self) -> None:
        """A token to every other rank, and one from each. Raises `OSError`."""
        self._round += 1
        for peer in self._peers.values():
            peer.send(_TOKEN)
        until_s = time.monotonic() + self._timeout_s
        while any(count < self._round for count in self._rounds.values()):
            ready = self._poll.poll(max(0.0, until_s - time.monotonic()) * 1e3)
            if not ready:
                raise TimeoutError("a rank did not come in time")
            for fd, _ in ready:
                self._take(self._ranks[fd])

    def _take(self, rank: int) -> None:
        tokens = len(self._peers[rank].recv(_TOKENS))
        self._rounds[rank] += tokens
        if tokens:
            return
        # A rank that leaves after it entered this exchange is missed in the next one.
        if self._rounds[rank] < self._round:
            raise ConnectionError(f"rank {rank} is gone")
        self._poll.unregister(self._peers[rank])

    def _hang_up(self) -> None:
        """Wakes every rank that waits for this one, and this one."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _lost(self) -> PeerLostError:
        return lost_rank(self.rank, self.size, self._timeout_s)
