"""Binds the HTTP server's socket. This module imports no HTTP server, so commands can check the port early."""

from __future__ import annotations

import socket

from disagg.core.config.read import ApiConfig
from disagg.core.errors import ConfigError


def bind(config: ApiConfig, *, shared: bool = False) -> socket.socket:
    """Returns a bound socket that does not listen yet: the kernel refuses connections until `serve` listens.

    `shared`: whether other processes bind the same port. Raises `ConfigError` when the address cannot be used. The
    caller closes the socket, or passes it to `serve`.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            config.host, config.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        # Pass the protocol number: asyncio disables Nagle's delay (40 ms per reply) only for explicit TCP.
        listener = socket.socket(family, kind, protocol)
    except OSError as exc:
        raise ConfigError(f"api.host = {config.host!r} is not an address of this machine: {exc}") from exc
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind(address)
    except OSError as exc:
        listener.close()
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port}: {exc.strerror}; choose another --port or --host"
        ) from exc
    return listener
