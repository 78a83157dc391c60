"""Loading ucxx, and worker addresses that can be trusted to be whole."""

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
    """UCX's low-level Python module and its array type; imported on first use only."""
    # Read once, when the library is loaded. Errors reach us as statuses; its own lines on stderr would repeat them.
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
    """UCX's, such as `1.21.0`. Raises `ConfigError` when ucxx cannot be imported."""
    return ".".join(map(str, load()[0].get_ucx_version()))


def offers(transport: str) -> bool:
    """Whether UCX can use one of its transports, or a group of them (`ib`), here.

    Raises `ConfigError` when ucxx cannot be imported.
    """
    ucx, _ = load()
    try:
        ucx.UCXContext({"TLS": transport}, feature_flags=(ucx.Feature.TAG,))
    except ucx.UCXError:
        return False
    return True


def settings(environment: Mapping[str, str]) -> str:
    """What the environment tells UCX, but for its log: `UCX_TLS=tcp`, ...; sorted. Empty for nothing."""
    names = (name for name in environment if name.startswith("UCX_") and name not in _QUIET)
    return " ".join(f"{name}={environment[name]}" for name in sorted(names))


def wrap_address(address: bytes) -> bytes:
    """UCX aborts the process on a damaged address, so ours carry a checksum."""
    return _MAGIC + zlib.crc32(address).to_bytes(4, "big") + address


def unwrap_address(peer: str, wrapped: bytes) -> bytes:
    address = wrapped[8:]
    if wrapped[:4] != _MAGIC or zlib.crc32(address) != int.from_bytes(wrapped[4:8], "big"):
        raise TransportError(
            f"cannot connect to {peer}: {len(wrapped)} bytes are no address of a UCX transport"
        )
    return address
