"""Base URLs that users give for HTTP servers."""

from __future__ import annotations

import httpx

from disagg.core.errors import ConfigError


def base_url(flag: str, text: str) -> str:
    """Returns the base URL of an HTTP server, without `/v1`. `flag` names the setting in errors.

    Raises `ConfigError` unless `text` is an HTTP URL without a password: messages and logs contain the URL.
    """
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL as exc:
        raise ConfigError(f"{flag} {text}: {exc}") from exc
    if url.scheme not in ("http", "https") or not url.host or url.userinfo:
        raise ConfigError(f"{flag} {text}: give the base URL of the server, such as http://127.0.0.1:8000")
    return text.rstrip("/").removesuffix("/v1")
