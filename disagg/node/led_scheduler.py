"""Protocols of a scheduler and its requests, as `disagg.node.leader.Leader` uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from disagg.core.types import RequestKey
from disagg.kv.cache_operations import StorageReport


class LedRequest(Protocol):
    """Fields of a request that a leader uses."""

    key: RequestKey
    router: str
    deadline_s: float
    closing: bool
    release_requested: bool


class LedScheduler(Protocol):
    """The methods that a leader uses of its scheduler."""

    @property
    def requests(self) -> Mapping[RequestKey, LedRequest]:
        """Requests that still own memory or wait for a release."""

    def moved(self, number: int, rank: int, error: str) -> None:
        """Records a rank's report of an operation between tiers of the prefix cache; see `KVManager.moved`."""

    def storage_moved(self, report: StorageReport) -> None:
        """Records a rank's report of an operation of the third tier; see `KVManager.storage_moved`."""

    def check(self) -> None:
        """Raises `InvariantError` if the scheduler is inconsistent."""
