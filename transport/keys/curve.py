"""CURVE keys of a cluster. Only processes with these keys can join the cluster.

`ControlKeys` is one generation of keys. `KeySet` holds all valid generations: one, or two during a key rotation.
`transport.keys.file` stores a key set in a file. In a running process, `transport.keys.ring` reloads a changed file.
"""

from __future__ import annotations

import hashlib

import msgspec
import zmq

from disagg.core.errors import ConfigError


class ControlKeys(msgspec.Struct, frozen=True):
    """Two key pairs, in Z85: every channel listens with the server pair and dials with the client pair."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    @property
    def name(self) -> str:
        """Name of the generation in logs: a hash of the public key, which reveals no secret."""
        return hashlib.sha256(self.server_public.encode()).hexdigest()[:8]

    def check(self) -> None:
        """Raises `ConfigError` unless the server keys and the client keys are each a pair of CURVE keys."""
        for what, public, secret in (
            ("server", self.server_public, self.server_secret),
            ("client", self.client_public, self.client_secret),
        ):
            try:
                sound = zmq.curve_public(secret.encode()) == public.encode()
            except (zmq.ZMQError, ValueError, TypeError):
                sound = False
            if not sound:
                raise ConfigError(f"{what}_public and {what}_secret are not a pair of CURVE keys")

    def __repr__(self) -> str:
        """Returns text without the keys, because a repr can end up in a log."""
        return f"ControlKeys({self.name})"


class KeySet(msgspec.Struct, frozen=True):
    """The generations of a cluster's keys: one, or two during a rotation."""

    current: ControlKeys
    next: ControlKeys | None = None
    next_from_unix_s: float = 0.0
    """Unix time from which channels dial with `next`; `current` is then the previous generation."""

    def generations(self, now_unix_s: float) -> tuple[ControlKeys, ...]:
        """Returns the valid generations. Channels present the first one and accept peers of every one."""
        if self.next is None:
            return (self.current,)
        if self.is_rotated(now_unix_s):
            return (self.next, self.current)
        return (self.current, self.next)

    @property
    def names(self) -> frozenset[str]:
        """Names of all generations."""
        return frozenset(keys.name for keys in self.generations(0.0))

    def is_rotated(self, now_unix_s: float) -> bool:
        """Returns whether channels present `next` instead of `current`."""
        return self.next is not None and now_unix_s >= self.next_from_unix_s

    def check(self) -> None:
        """Raises `ConfigError` unless the keys of each generation are valid pairs."""
        for keys in self.generations(0.0):
            keys.check()


def make_keys() -> ControlKeys:
    """Generates a new generation of keys."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return ControlKeys(*(part.decode() for part in (*server, *client)))
