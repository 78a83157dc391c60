"""Tells routers, which may be on other hosts, of a cluster's groups; and passes on what operators ask for.

It only talks: groups are served whether it is there or not. `disagg.router.follow` is the other side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import structlog

from disagg.core.config import ControlConfig, Role
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo
from transport import messages as m
from transport.control import ControlChannel
from transport.hosts import is_loopback, own_host

log = structlog.get_logger(__name__)

ScaleTo = Callable[[Role, int, Callable[[str], None]], None]
"""`scale(role, count, done)`, which must not block: `done` is called with an error or "" when it has happened."""


class Directory:
    """Owns its channel. For any thread."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._scale: ScaleTo = lambda role, count, done: done(
            "the cluster is still starting: ask again later"
        )
        self._changed = threading.Condition()
        self._routers: dict[str, set[str]] = {}
        """Names of the groups that each router may give requests to."""
        self._told = m.Groups(0, [], [])

    @property
    def address(self) -> str:
        """Where it listens: what routers join."""
        return self._control.address

    @property
    def routers(self) -> tuple[str, ...]:
        """Addresses of those that listen now."""
        with self._changed:
            return tuple(self._routers)

    def start(self) -> None:
        """Starts to answer. Until `tell` there are no groups."""
        self._control.start(self._on_message, self._on_lost)

    def close(self) -> None:
        """Ends it, when those who listen have confirmed the last that was told, or after a moment."""
        self._control.close(linger_s=0.5)

    def on_scale(self, scale: ScaleTo) -> None:
        """From now on operators are heard."""
        self._scale = scale

    def tell(self, groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        """These are the groups now; those named in `draining` must be given nothing new. Never blocks."""
        with self._changed:
            self._told = m.Groups(self._told.version + 1, list(groups), list(draining))
            for router in self._routers:
                self._send(router)

    def wait_unused(self, names: Sequence[str], timeout_s: float) -> bool:
        """Waits until no router gives requests to these groups, or is gone; False when the time is up first."""

        def unused() -> bool:
            return all(using.isdisjoint(names) for using in self._routers.values())

        with self._changed:
            return self._changed.wait_for(unused, timeout_s)

    # --- on the channel's thread

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Join():
                with self._changed:
                    log.info("router_joined", router=peer)
                    self._routers[peer] = set()
                    self._send(peer)
                self._control.watch(peer)
            case m.Using():
                self._on_using(peer, message)
            case m.Scale():
                log.info("scale_asked", role=message.role, count=message.count, operator=peer)
                self._scale(
                    message.role, message.count, lambda error: self._control.send(peer, m.Scaled(error))
                )
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _on_using(self, peer: str, message: m.Using) -> None:
        with self._changed:
            # An answer to something older does not speak of the groups that were told since.
            if peer in self._routers and message.version == self._told.version:
                self._routers[peer] = set(message.names)
                self._changed.notify_all()

    def _on_lost(self, peer: str) -> None:
        with self._changed:
            if self._routers.pop(peer, None) is not None:
                log.info("router_lost", router=peer)
                self._changed.notify_all()

    def _send(self, router: str) -> None:
        told = self._told
        self._routers[router] |= {group.name for group in told.groups} - set(told.draining)
        self._control.send(router, told)


def directory_host(address: str, config: ControlConfig) -> str:
    """The host of a directory's `address`, `tcp://HOST:PORT`.

    Raises `ConfigError` when it is none, or could not answer us there.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or ":" in host:
        raise ConfigError(f"--join {address}: write tcp://HOST:PORT, as `disagg launch` says it")
    if is_loopback(own_host(config.host)) and not is_loopback(host):
        raise ConfigError(
            f"control.host = {config.host} cannot be reached from {host}: set control.host to auto, or to this "
            f"host's address"
        )
    return host
