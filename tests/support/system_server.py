"""The HTTP API over real groups in this process."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from api_server import ApiServer
from local_groups import LocalGroups


class SystemServer(ApiServer):
    """As `ApiServer`, but its `generator` is a router of `groups`, which must outlive it."""

    def __init__(self, groups: LocalGroups, *keys: str, **settings: Any) -> None:
        super().__init__(*keys, **settings)
        self._groups = groups

    @asynccontextmanager
    async def _generating(self) -> AsyncIterator[Any]:
        async with self._groups.router() as router:
            yield router
