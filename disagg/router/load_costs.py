"""Times to load cached tokens, which a group has measured, relative to the time to compute a token."""

from __future__ import annotations

from typing import NamedTuple

from disagg.core.status import GroupStatus

MOST_COST = 10.0
"""Largest measured cost that counts, so that one wrong measurement cannot exclude a group for long."""


class LoadCosts(NamedTuple):
    """Costs of a group's loads. A cost of 0 is not measured yet."""

    host: float = 0.0
    """Time to load a token from host memory, divided by the time to compute it."""
    fetch: float = 0.0
    """Time to fetch a token from the storage into host memory, divided by the time to compute it."""

    @staticmethod
    def of(status: GroupStatus) -> LoadCosts:
        """Returns the costs from the rates of a group's status. Both are 0 for a decode group, which computes no
        prompts."""
        return LoadCosts(
            _cost(status.prompt_tokens_per_s, status.host_load_tokens_per_s),
            _cost(status.prompt_tokens_per_s, status.storage_fetch_tokens_per_s),
        )

    def or_settings(self, host: float, storage: float) -> tuple[float, float]:
        """Returns the costs of a token in host memory, and of a token in the storage.

        `host`, `storage`: `router.host_load_cost` and `router.storage_load_cost`, used for what is not measured. A
        token in the storage is fetched, then loaded, so it never costs less than a token in host memory.
        """
        in_host = self.host or host
        return in_host, in_host + self.fetch if self.fetch else max(in_host, storage)


NOT_MEASURED = LoadCosts()


def _cost(computed_tokens_per_s: float, loaded_tokens_per_s: float) -> float:
    if not (computed_tokens_per_s and loaded_tokens_per_s):
        return 0.0
    return min(MOST_COST, computed_tokens_per_s / loaded_tokens_per_s)
