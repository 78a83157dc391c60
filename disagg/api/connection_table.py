"""The table of open HTTP connections: their client addresses, and which connections are idle.

The table only decides which connection to close; `connections.py` closes it.
"""

from __future__ import annotations

import ipaddress
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import NamedTuple, Protocol

import msgspec

from disagg.core.errors import InvariantError

SPARE = 64
"""Connections accepted above the limit, only to read the head of their first request: health probes are still
answered."""
_IPV6_PREFIX = 64
"""Prefix length by which IPv6 clients are counted: one client usually owns a whole /64 network."""


class Connection(Protocol):
    """The interface of a connection that the table needs. Connections are hashed by identity."""

    def flushed(self) -> bool:
        """Returns whether the client has taken every byte that was written."""


class ConnectionDecision(NamedTuple):
    """The decision about a new connection."""

    held: bool
    """Whether the table has a place for the connection; if False, the caller closes the connection immediately."""
    evicted: Connection | None = None
    """The connection that was removed from the table to make room; the caller closes it."""
    refused: str = ""
    """Reason for which requests of the connection are refused with a 503; empty if they are served."""


class ConnectionStatistics(msgspec.Struct, frozen=True):
    """Counts at one moment."""

    open: int
    """Connections in the table."""
    waiting: int
    """Idle connections: without a request in progress."""
    addresses: int
    """Client addresses with at least one connection."""


class ConnectionTable:
    """Limits the connections, in total and for each client address. Not thread-safe: one event loop uses the table.

    A full table evicts the connection that has been idle longest. When the address limit is reached, the eviction is
    limited to connections of that address. A connection with a request in progress is never evicted.
    """

    def __init__(self, limit: int, address_limit: int) -> None:
        self._limit, self._address_limit = limit, address_limit
        self._open: dict[Connection, str] = {}
        self._counts: Counter[str] = Counter()
        self._waiting: OrderedDict[Connection, None] = OrderedDict()
        self._waiting_of: dict[str, OrderedDict[Connection, None]] = {}

    def admit(self, connection: Connection, address: str) -> ConnectionDecision:
        """Adds a new connection, which counts as idle until its first request. Returns what the caller must do."""
        waiting, why = self._room(address)
        if not why:
            self._enter(connection, address)
            return ConnectionDecision(held=True)
        evicted = next((one for one in waiting if one.flushed()), None)
        if evicted is not None:
            self.remove(evicted)
        elif len(self._open) >= self._limit + SPARE:
            return ConnectionDecision(held=False, refused=why)
        self._enter(connection, address)
        return ConnectionDecision(held=True, evicted=evicted, refused="" if evicted is not None else why)

    def begin(self, connection: Connection) -> None:
        """Marks the connection as busy with a request. No effect on a connection that is not in the table."""
        address = self._open.get(connection)
        if address is not None and connection in self._waiting:
            self._leave_waiting(connection, address)

    def wait(self, connection: Connection) -> None:
        """Marks the connection as idle, because its requests have ended. No effect on a connection that is not in the
        table."""
        address = self._open.get(connection)
        if address is not None:
            self._waiting[connection] = None
            self._waiting_of.setdefault(address, OrderedDict())[connection] = None

    def remove(self, connection: Connection) -> None:
        """Removes the connection; a second call does nothing."""
        address = self._open.pop(connection, None)
        if address is None:
            return
        if connection in self._waiting:
            self._leave_waiting(connection, address)
        self._counts[address] -= 1
        if not self._counts[address]:
            del self._counts[address]

    def statistics(self) -> ConnectionStatistics:
        """Returns a consistent snapshot."""
        return ConnectionStatistics(len(self._open), len(self._waiting), len(self._counts))

    def check(self) -> None:
        """Raises `InvariantError` unless the idle lists and the counts per address agree with the open
        connections."""
        of_addresses = [(one, address) for address, some in self._waiting_of.items() for one in some]
        fits = (
            set(self._waiting) == {one for one, _ in of_addresses}
            and all(self._open.get(one) == address for one, address in of_addresses)
            and Counter(self._open.values()) == self._counts
            and all(self._waiting_of.values())
            and len(self._open) <= self._limit + SPARE
        )
        if not fits:
            raise InvariantError(f"connections: {self.statistics()}, {self._counts}, {self._open}")

    def _room(self, address: str) -> tuple[Iterable[Connection], str]:
        """Returns the connections that may be evicted, and the limit that was reached; '' if no limit was reached."""
        if self._counts[address] >= self._address_limit:
            why = f"this address has {self._address_limit} connections (api.max_connections_per_address), all in use"
            return self._waiting_of.get(address, ()), why
        if len(self._open) >= self._limit:
            return (
                self._waiting,
                f"the server has {self._limit} connections (api.max_connections), all in use",
            )
        return (), ""

    def _enter(self, connection: Connection, address: str) -> None:
        self._open[connection] = address
        self._counts[address] += 1
        self.wait(connection)

    def _leave_waiting(self, connection: Connection, address: str) -> None:
        del self._waiting[connection], self._waiting_of[address][connection]
        if not self._waiting_of[address]:
            del self._waiting_of[address]


def address_of(host: str) -> str:
    """Returns the address that identifies a client: an IPv4 address (also IPv4-mapped), or an IPv6 /64 network."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))
