"""HTTP client of a server's `/status` endpoint. Its error messages have one line."""

from __future__ import annotations

from types import TracebackType

import httpx
import msgspec

from disagg.core.errors import DisaggError
from disagg.core.status import ServiceStatus
from disagg.core.urls import base_url

TIMEOUT_S = 5.0
"""Timeout of one status query."""


class StatusClient:
    """Queries the status of one server over one connection. A context manager, which closes the connection."""

    def __init__(self, url: str, api_key: str | None) -> None:
        """`url` is the server's base URL, with or without `/v1`. Raises `ConfigError` for a malformed URL."""
        self._url = base_url("--url", url) + "/status"
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

    def _fetch(self) -> tuple[bytes, ServiceStatus]:
        try:
            reply = self._http.get(self._url)
        except httpx.HTTPError as exc:
            raise DisaggError(f"{self._url} cannot be reached: {str(exc) or type(exc).__name__}") from exc
        if reply.status_code == 401:
            mend = "the given key is wrong" if self._keyed else "give a key with --api-key-file"
            raise DisaggError(f"{self._url} requires an API key: {mend}")
        if reply.status_code != 200:
            raise DisaggError(f"{self._url} answered {reply.status_code}: is a disagg server there?")
        try:
            return reply.content, msgspec.json.decode(reply.content, type=ServiceStatus)
        except msgspec.DecodeError as exc:
            raise DisaggError(f"{self._url} is not the status of a disagg server: {exc}") from exc
