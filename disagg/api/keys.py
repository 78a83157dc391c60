"""API keys: read from a file and the environment, compared in constant time."""

from __future__ import annotations

import hmac
from collections.abc import MutableMapping
from pathlib import Path

from disagg.api.errors import ApiError
from disagg.core.config.read import ApiConfig
from disagg.core.errors import ConfigError
from transport.hosts import is_loopback

VARIABLE = "DISAGG_API_KEYS"


def load_api_keys(file: str | None, env: MutableMapping[str, str]) -> tuple[bytes, ...]:
    """Returns the API keys of `file` (one per line) and of DISAGG_API_KEYS (separated by commas).

    Empty lines and `#` comments of the file are skipped. The variable is removed from `env`, so later processes do
    not inherit the keys. Without keys and without a file, returns (): clients then need no key. Raises `ConfigError`
    for a file without a key, because such a server would be open by mistake, and for a key that is invalid in a
    header.
    """
    lines = _lines(file) if file is not None else []
    keys = [key.strip() for key in (*lines, *env.pop(VARIABLE, "").split(","))]
    keys = [key for key in keys if key and not key.startswith("#")]
    if file is not None and not any(line.strip() and not line.strip().startswith("#") for line in lines):
        raise ConfigError(f"{file} contains no API key: write one key per line")
    for key in keys:
        if not (key.isascii() and key.isprintable() and " " not in key):
            raise ConfigError("an API key may contain only printable ASCII characters without spaces")
    return tuple(key.encode() for key in keys)


def require_api_keys(config: ApiConfig, env: MutableMapping[str, str]) -> tuple[bytes, ...]:
    """Returns the API keys, read by `load_api_keys`. Raises `ConfigError` if there is no key and other machines can
    reach the address, unless `api.allow_no_key` is set."""
    keys = load_api_keys(config.key_file, env)
    if not (keys or is_loopback(config.host) or config.allow_no_key):
        raise ConfigError(
            f"api.host = {config.host!r} lets other machines connect, and there is no API key: give "
            f"--api-key-file or {VARIABLE}, or serve without keys with --set api.allow_no_key=true"
        )
    return keys


def check_key(keys: tuple[bytes, ...], authorization: bytes | None, plain: bytes | None = None) -> None:
    """Raises a 401 unless a header contains one of `keys`. Empty `keys`: no check.

    `authorization`: value of Authorization, `Bearer KEY`. `plain`: value of `x-api-key`, a key without a scheme.
    """
    if not keys:
        return
    scheme, _, bearer = (authorization or b"").partition(b" ")
    given = [bearer.strip()] if scheme.lower() == b"bearer" else []
    given += [] if plain is None else [plain.strip()]
    # Compare all keys: the duration must not reveal which key matches.
    matches = [hmac.compare_digest(key, one) for one in given for key in keys]
    if not any(matches):
        said = (
            "is not valid for this server"
            if bearer or plain
            else "is missing: send 'Authorization: Bearer KEY'"
        )
        raise ApiError(
            401, f"the API key {said}", code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"}
        )


def _lines(file: str) -> list[str]:
    try:
        return Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the API keys in {file}: {exc}") from exc
