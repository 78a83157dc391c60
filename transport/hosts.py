"""Host addresses: the address of this host, its interfaces, and whether an address is loopback."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from disagg.core.errors import ConfigError

AUTO = "auto"
LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address reserved for documentation (RFC 5737), where nothing listens. No packet is sent."""


def own_host(configured: str) -> str:
    """Returns `configured`, or for `auto` the IPv4 address from which this host reaches others.

    Connecting a UDP socket sends no packet but selects the interface and its address. Falls back to loopback.
    """
    if configured != AUTO:
        return configured
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(_ELSEWHERE)
        except OSError:
            return LOOPBACK
        return str(probe.getsockname()[0])


def is_loopback(host: str) -> bool:
    """Returns whether only processes on the same host can reach the address `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(host: str) -> str:
    """Returns the network interface of this host with the address `host`. Raises `ConfigError` when no interface has
    this address."""
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as exc:
        raise ConfigError(f"control.host = {host} cannot be resolved: {exc}") from exc
    for name, addresses in psutil.net_if_addrs().items():
        if wanted & {address.address for address in addresses}:
            return name.partition(":")[0]  # eth0:1 is a second address of eth0
    raise ConfigError(
        f"control.host = {host} is not an address of this host; set control.host to auto or to one of its addresses"
    )
