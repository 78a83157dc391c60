"""The links that a UCX worker may use."""

from __future__ import annotations

import enum


class Reach(enum.Enum):
    """A kind of link that a UCX worker may use."""

    ONE_HOST = "shm"
    """Shared memory and CUDA IPC, between processes of one user on one host. No TCP port."""
    RDMA = "rdma"
    """RDMA devices and CUDA IPC. No TCP port."""
    TCP = "tcp"
    """TCP on one interface, and CUDA IPC. Only for a trusted network."""
