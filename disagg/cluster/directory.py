"""Announces a cluster's groups to routers, also on other hosts, and forwards operators' requests (scale, roll).

A cluster whose only router runs in the same process needs no directory. `disagg.router.follow` is the router's side.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import structlog

from disagg.core.config.read import ControlConfig, Role
from disagg.core.errors import ConfigError
from disagg.core.types import GroupInfo
from transport.control import messages as m
from transport.control.base import ControlChannel
from transport.hosts import is_loopback, own_host

log = structlog.get_logger(__name__)

ScaleTo = Callable[[Role, int, Callable[[str], None]], None]
"""Handler `scale(role, count, done)` of a scale request: must not block; calls `done` with an error, or "" on
success."""
BeginRoll = Callable[[str, m.Roll, Callable[[m.Message], None]], None]
"""Handler `begin(operator, request, send)` of a roll request: must not block; `send` replies to the operator."""
StopRoll = Callable[[str], None]
"""Handler `stop(operator)`: the operator has stopped its roll, or is lost. Must not block."""


@dataclass(slots=True)
class _Router:
    """A connected router."""

    using: set[str] = field(default_factory=set)
    """Names of the groups that the router may still use."""
    applied: int | None = None
    """Version of the list that the router has applied last."""


class Directory:
    """The server that announces groups to routers. Owns its control channel. Thread-safe."""

    def __init__(self, control: ControlChannel) -> None:
        self._control = control
        self._scale: ScaleTo = lambda role, count, done: done("the cluster is still starting: retry later")
        self._begin_roll: BeginRoll = lambda operator, request, send: send(
            m.Rolled("the cluster is still starting: retry later")
        )
        self._stop_roll: StopRoll = lambda operator: None
        self._changed = threading.Condition()
        self._routers: dict[str, _Router] = {}
        """Connected routers, by control address."""
        self._latest = m.Groups(0, [], [])

    @property
    def address(self) -> str:
        """Control address of the directory, which routers are given as `--join`."""
        return self._control.address

    @property
    def routers(self) -> tuple[str, ...]:
        """Control addresses of the connected routers."""
        with self._changed:
            return tuple(self._routers)

    def start(self) -> None:
        """Starts to accept routers. They receive the first list of groups after the first `announce`."""
        self._control.start(self._on_message, self._on_lost)

    def close(self) -> None:
        """Closes the channel as soon as all routers have acknowledged the last announcement, or after 0.5 s."""
        self._control.close(linger_s=0.5)

    def on_scale(self, scale: ScaleTo) -> None:
        """Sets the handler of scale requests."""
        self._scale = scale

    def on_roll(self, begin: BeginRoll, stop: StopRoll) -> None:
        """Sets the handlers of roll requests."""
        self._begin_roll, self._stop_roll = begin, stop

    def announce(self, groups: Sequence[GroupInfo], draining: Sequence[str]) -> None:
        """Announces the groups; routers send no new requests to the groups named in `draining`. Never blocks."""
        with self._changed:
            self._latest = m.Groups(self._latest.version + 1, list(groups), list(draining))
            for router in self._routers:
                self._send(router)

    def wait_unused(self, names: Sequence[str], timeout_s: float) -> bool:
        """Waits until no connected router uses these groups; returns False after the timeout."""

        def unused() -> bool:
            return all(router.using.isdisjoint(names) for router in self._routers.values())

        with self._changed:
            return self._changed.wait_for(unused, timeout_s)

    def wait_known(self, names: Sequence[str], timeout_s: float) -> tuple[str, ...]:
        """Waits until every connected router uses these groups; returns the routers that do not after the timeout.

        A router that joins later gets the groups with its first list.
        """

        def others() -> tuple[str, ...]:
            version = self._latest.version
            return tuple(
                address
                for address, router in self._routers.items()
                if router.applied != version or not router.using.issuperset(names)
            )

        with self._changed:
            self._changed.wait_for(lambda: not others(), timeout_s)
            return others()

    # --- on the channel's thread

    def _on_message(self, peer: str, message: m.Message) -> None:
        match message:
            case m.Join():
                with self._changed:
                    log.info("router_joined", router=peer)
                    self._routers[peer] = _Router()
                    self._send(peer)
                self._control.watch(peer)
            case m.Using():
                self._on_using(peer, message)
            case m.Scale():
                log.info("scale_requested", role=message.role, count=message.count, operator=peer)
                self._scale(
                    message.role, message.count, lambda error: self._control.send(peer, m.Scaled(error))
                )
            case m.Roll():
                kinds = list(message.kinds)
                log.info("roll_requested", kinds=kinds, settings=len(message.settings), operator=peer)
                self._control.watch(peer)
                self._begin_roll(peer, message, partial(self._control.send, peer))
            case m.StopRoll():
                self._stop_roll(peer)
            case _:
                log.warning("unexpected_message", kind=type(message).__name__, peer=peer)

    def _on_using(self, peer: str, message: m.Using) -> None:
        with self._changed:
            # A reply to an older version does not cover groups that were announced since.
            if peer in self._routers and message.version == self._latest.version:
                self._routers[peer] = _Router(set(message.names), message.version)
                self._changed.notify_all()

    def _on_lost(self, peer: str) -> None:
        self._stop_roll(peer)
        with self._changed:
            if self._routers.pop(peer, None) is not None:
                log.info("router_lost", router=peer)
                self._changed.notify_all()

    def _send(self, router: str) -> None:
        latest = self._latest
        # Before the first announcement, an empty list would make the router drop groups that will be adopted.
        if not latest.version:
            return
        self._routers[router].using |= {group.name for group in latest.groups} - set(latest.draining)
        self._control.send(router, latest)


def directory_host(address: str, config: ControlConfig) -> str:
    """Returns the host of a directory's `address`, `tcp://HOST:PORT`.

    Raises `ConfigError` for a malformed address, and if that host could not connect back to this process.
    """
    scheme, _, rest = address.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not host or not port.isdigit() or not 0 < int(port) < 1 << 16 or ":" in host:
        raise ConfigError(f"--join {address}: write tcp://HOST:PORT, as `disagg launch` prints it")
    if is_loopback(own_host(config.host)) and not is_loopback(host):
        raise ConfigError(
            f"control.host = {config.host} cannot be reached from {host}: set control.host to auto, or to this "
            f"host's address"
        )
    return host
