"""HTTP client of a server's `/status` and `/profile`. Its error messages have one line."""

from __future__ import annotations

from collections.abc import Callable, Collection
from types import TracebackType
from typing import Any, NoReturn

import httpx
import msgspec

from disagg.core.errors import ConfigError, DisaggError
from disagg.core.profile.types import TraceSummary
from disagg.core.status import ServiceStatus
from disagg.core.urls import base_url

TIMEOUT_S = 5.0
"""Timeout of one status query."""
PROFILE_TIMEOUT_S = 180.0
"""Longest silence of the server after the time limit of the steps: the rank writes and summarizes the trace."""


class _ProfileLine(msgspec.Struct, frozen=True):
    """A line of the reply to `/profile`."""

    steps: int = 0
    summary: TraceSummary | None = None
    error: dict[str, Any] | None = None


class StatusClient:
    """Queries one server over one connection. A context manager, which closes the connection."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` is the server's base URL, with or without `/v1`. Raises `ConfigError` for a malformed URL."""
        self._base = base_url("--url", url)
        self._url = self._base + "/status"
        headers = {} if api_key is None else {"authorization": f"Bearer {api_key}"}
        self._keyed = api_key is not None
        # With an explicit transport, httpx ignores the proxies that environment variables configure.
        self._http = httpx.Client(transport=httpx.HTTPTransport(), headers=headers, timeout=TIMEOUT_S)

    def __enter__(self) -> StatusClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.close()

    def status(self) -> ServiceStatus:
        """Returns the server's status.

        Raises `DisaggError` if the server is unreachable, rejects the key, or is no disagg server.
        """
        return self._fetch()[1]

    def status_json(self) -> bytes:
        """Returns the JSON text of the server's status. Raises the errors of `status`."""
        return self._fetch()[0]

    def profile(self, body: dict[str, Any], on_steps: Callable[[int], None]) -> TraceSummary:
        """Records steps of a rank, as the `body` of `/profile` says. Calls `on_steps` with the steps so far.

        Raises the errors of `status`, `ConfigError` for a request that the server refuses, and `DisaggError` if there
        is no trace.
        """
        url = self._base + "/profile"
        timeout_s = PROFILE_TIMEOUT_S + body.get("limit_s", 0.0)  # a rank is silent during a long step
        try:
            with self._http.stream("POST", url, json=body, timeout=timeout_s) as reply:
                if reply.status_code != 200:
                    self._refuse(url, reply.status_code, reply.read())
                for text in reply.iter_lines():
                    line = msgspec.json.decode(text, type=_ProfileLine)
                    if line.error is not None:
                        raise DisaggError(str(line.error.get("message")))
                    if line.summary is not None:
                        return line.summary
                    on_steps(line.steps)
        except httpx.HTTPError as exc:
            raise DisaggError(f"{url} cannot be reached: {str(exc) or type(exc).__name__}") from exc
        except msgspec.DecodeError as exc:
            raise DisaggError(f"{url} does not reply as a disagg server: {exc}") from exc
        raise DisaggError(f"{url} ended its reply before the profile was complete")

    def _refuse(self, url: str, status: int, body: bytes) -> NoReturn:
        self._check_status(url, status, (200, 400, 409, 429, 503, 504))
        try:
            said = msgspec.json.decode(body, type=_ProfileLine).error or {}
        except msgspec.DecodeError:
            said = {}
        raise (ConfigError if status == 400 else DisaggError)(
            str(said.get("message") or f"{url} answered {status}")
        )

    def _check_status(self, url: str, status: int, expected: Collection[int] = (200,)) -> None:
        if status == 401:
            mend = "the given key is wrong" if self._keyed else "give a key with --api-key-file"
            raise DisaggError(f"{url} requires an API key: {mend}")
        if status not in expected:
            raise DisaggError(f"{url} answered {status}: is a disagg server there?")

    def _fetch(self) -> tuple[bytes, ServiceStatus]:
        try:
            reply = self._http.get(self._url)
        except httpx.HTTPError as exc:
            raise DisaggError(f"{self._url} cannot be reached: {str(exc) or type(exc).__name__}") from exc
        self._check_status(self._url, reply.status_code)
        try:
            return reply.content, msgspec.json.decode(reply.content, type=ServiceStatus)
        except msgspec.DecodeError as exc:
            raise DisaggError(f"{self._url} is not the status of a disagg server: {exc}") from exc
