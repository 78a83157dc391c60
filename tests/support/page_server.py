"""The real server with a status that a test writes, for the page and whoever else asks for it."""

from __future__ import annotations

from typing import Any

from api_server import ApiServer
from status_pictures import BEGAN_UNIX_S, service

from disagg.core.status import ServiceStatus


class PageServer:
    """`with PageServer(...) as server:`; each look at `/status` comes `STEP_S` later than the one before."""

    STEP_S = 1.0

    def __init__(self, *keys: str) -> None:
        self.api = ApiServer(*keys)
        self.shape: dict[str, Any] = {}
        """Arguments of `status_pictures.service`."""
        self.looks = 0
        self._began_unix_s = BEGAN_UNIX_S

    def __enter__(self) -> PageServer:
        self.api.__enter__()
        self.api.service.status = self.status  # type: ignore[method-assign]
        return self

    def __exit__(self, *exc: object) -> None:
        self.api.__exit__(*exc)

    @property
    def url(self) -> str:
        """Of the page."""
        return f"{self.api.url}/"

    def status(self) -> ServiceStatus:
        """What `/status` says next."""
        self.looks += 1
        return self.last()

    def last(self) -> ServiceStatus:
        """What it said last."""
        return service(10.0 + self.looks * self.STEP_S, began_unix_s=self._began_unix_s, **self.shape)

    def restart(self) -> None:
        """From now on it is another process, that began just now."""
        self._began_unix_s, self.looks = self.last().unix_s, 0
