"""The collective of ranks on one host that do not each have their own GPU: shared memory holds the data, and unix
sockets synchronize the ranks.

In an all-reduce, each rank writes its data to its part of the memory. When every rank has written, each rank adds all
parts in rank order. One exchange of messages per all-reduce is enough, because calls use the two halves of the memory
alternately. A rank writes to a half again only after the exchange of the next call. Every rank enters this exchange
after it has read the half.
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
"""Size of a rank's part in one sum. Larger tensors need several sums."""
_TOKEN = b"."
_TOKENS = 64
"""Largest number of bytes of one read from a socket. No rank is more than one exchange ahead, so one read drains the
socket."""


class SharedCollective:
    """Collective of one group's ranks on one host: processes or threads of one user, on CPUs or on shared GPUs.

    GPU tensors are copied through host memory on the current stream, which is synchronized. `rank_sum` adds the
    parts: an element has the same bits on every rank and in a tensor of any size.
    """

    recordable = False

    def __init__(self, *, rank: int, size: int, directory: Path, timeout_s: float = 60.0) -> None:
        """Joins the group; returns when all ranks have joined. All ranks pass the same `directory`, which is empty
        and private to the user (`disagg.core.folders.private_folder`).

        Raises PeerLostError if a rank does not join within `timeout_s`, which also limits each later exchange.
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
        """Number of exchanges that each other rank has entered, by rank."""
        self._busy = threading.Lock()
        """Lock that is held during use of the sockets, so that `close` on another thread frees the sockets only
        afterwards."""
        self._closed = False

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a contiguous tensor over the ranks, in place. Raises PeerLostError when a rank closed or timed out."""
        assert tensor.is_contiguous(), "partial results of a rank are contiguous"
        flat, elements = tensor.view(-1), PART_BYTES // tensor.itemsize
        for start in range(0, flat.numel(), elements):
            self._sum(flat[start : start + elements])

    def barrier(self) -> None:
        """Returns when every rank has entered. Raises PeerLostError when a rank closed or timed out."""
        with self._busy:
            try:
                self._exchange()
            except OSError as exc:
                self._shut_down()
                raise self._lost() from exc

    def close(self) -> None:
        """Closes this rank's connections; thread-safe. Ranks that wait for this rank raise PeerLostError."""
        self._shut_down()
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
        """Sends a byte to every other rank and receives one from each. Raises `OSError`."""
        self._round += 1
        for peer in self._peers.values():
            peer.send(_TOKEN)
        until_s = time.monotonic() + self._timeout_s
        while any(count < self._round for count in self._rounds.values()):
            ready = self._poll.poll(max(0.0, until_s - time.monotonic()) * 1e3)
            if not ready:
                raise TimeoutError("a rank did not enter the exchange within the timeout")
            for fd, _ in ready:
                self._take(self._ranks[fd])

    def _take(self, rank: int) -> None:
        tokens = len(self._peers[rank].recv(_TOKENS))
        self._rounds[rank] += tokens
        if tokens:
            return
        # If a rank closes after it has entered this exchange, the next exchange fails, not this one.
        if self._rounds[rank] < self._round:
            raise ConnectionError(f"rank {rank} has closed its connection")
        self._poll.unregister(self._peers[rank])

    def _shut_down(self) -> None:
        """Shuts the sockets down, which wakes this rank and every rank that waits for this rank."""
        for peer in self._peers.values():
            with contextlib.suppress(OSError):
                peer.shutdown(socket.SHUT_RDWR)

    def _lost(self) -> PeerLostError:
        return lost_rank(self.rank, self.size, self._timeout_s)
