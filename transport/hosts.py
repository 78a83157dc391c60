"""Addresses of hosts: which one is ours, and which are seen from this host only."""

from __future__ import annotations

import ipaddress
import socket

import psutil

from disagg.core.errors import ConfigError

AUTO = "auto"
LOOPBACK = "127.0.0.1"
_ELSEWHERE = ("192.0.2.1", 9)
"""An address for documentation (RFC 5737): nobody has it, and nothing is sent to it."""


def own_host(configured: str) -> str:
    """`configured`, or for `auto` the IPv4 address from which this host reaches others.

    To connect a UDP socket sends nothing but chooses the interface, and so the address. Without any: loopback.
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
    """Whether only processes of its own host reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def interface_of(host: str) -> str:
    """The network interface of this host that has the address `host`. Raises `ConfigError` when none has it."""
    try:
        wanted = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError as exc:
        raise ConfigError(f"control.host = {host} cannot be resolved: {exc}") from exc
    for name, addresses in psutil.net_if_addrs().items():
        if wanted & {address.address for address in addresses}:
            return name.partition(":")[0]  # eth0:1 is a second address of eth0
    raise ConfigError(
        f"control.host = {host} is no address of this host; set control.host to auto or to one of its addresses"
    )
