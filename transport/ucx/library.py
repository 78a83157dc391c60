"""Loads ucxx, and protects worker addresses with a checksum."""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from disagg.core.errors import ConfigError, TransportError

_MAGIC = b"ucx1"
_QUIET = {"UCX_WARN_UNUSED_ENV_VARS": "n", "UCX_LOG_LEVEL": "fatal", "UCXX_LOG_LEVEL": "FATAL"}


def load() -> tuple[ModuleType, Any]:
    """Returns ucxx's low-level Python module and array type, imported on first use. Raises `ConfigError`."""
    # UCX reads these variables once, at load time. UCX also logs to stderr the errors that it returns: switch this
    # off.
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    try:
        from ucxx._lib import libucxx
        from ucxx._lib.arr import Array
    except (ImportError, OSError) as exc:
        raise ConfigError(
            f"transport ucx needs ucxx, which cannot be imported ({exc}); install it with "
            "`pip install ucxx-cu13==0.52.* 'libucx-cu13<1.22'`, or choose another transport"
        ) from exc
    return libucxx, Array


def version() -> str:
    """Returns the UCX version, such as `1.21.0`. Raises `ConfigError` when ucxx cannot be imported."""
    return ".".join(map(str, load()[0].get_ucx_version()))


def offers(transport: str) -> bool:
    """Returns whether UCX can use a UCX transport, or a group of UCX transports such as `ib`, on this host.

    Raises `ConfigError` when ucxx cannot be imported.
    """
    ucx, _ = load()
    try:
        ucx.UCXContext({"TLS": transport}, feature_flags=(ucx.Feature.TAG,))
    except ucx.UCXError:
        return False
    return True


def settings(environment: Mapping[str, str]) -> str:
    """Returns the UCX variables of the environment, sorted and without those for logging, as `UCX_TLS=tcp ...`."""
    names = (name for name in environment if name.startswith("UCX_") and name not in _QUIET)
    return " ".join(f"{name}={environment[name]}" for name in sorted(names))


def wrap_address(address: bytes) -> bytes:
    """Adds a checksum to a worker address, because UCX aborts the process on a damaged address."""
    return _MAGIC + zlib.crc32(address).to_bytes(4, "big") + address


def unwrap_address(peer: str, wrapped: bytes) -> bytes:
    address = wrapped[8:]
    if wrapped[:4] != _MAGIC or zlib.crc32(address) != int.from_bytes(wrapped[4:8], "big"):
        raise TransportError(
            f"cannot connect to {peer}: {len(wrapped)} bytes are not the address of a UCX transport"
        )
    return address
