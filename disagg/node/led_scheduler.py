"""Protocols of a scheduler and its requests, as `disagg.node.leader.Leader` uses them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from disagg.core.types import RequestKey
from disagg.node.kv_manager import KVManager


class LedRequest(Protocol):
    """Fields of a request that a leader uses."""

    key: RequestKey
    router: str
    deadline_s: float
    closing: bool
    release_requested: bool


class LedScheduler(Protocol):
    """Members of a scheduler that its leader uses."""

    @property
    def requests(self) -> Mapping[RequestKey, LedRequest]:
        """Requests that still own memory or wait for a release."""

    @property
    def kv_manager(self) -> KVManager:
        """Owner of rows, pages and the prefix cache; the leader reports copies between the tiers to it."""

    def check(self) -> None:
        """Raises `InvariantError` if the scheduler is inconsistent."""
