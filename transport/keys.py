"""CURVE keys of a cluster: who has the file may join, nobody else."""

from __future__ import annotations

import json
import os
from pathlib import Path

import msgspec
import zmq

from disagg.core.errors import ConfigError


class ControlKeys(msgspec.Struct, frozen=True):
    """Two key pairs, in Z85: every channel listens with the server pair and calls with the client pair."""

    server_public: str
    server_secret: str
    client_public: str
    client_secret: str

    def __repr__(self) -> str:
        """Without the secrets: a repr ends up in logs."""
        return f"ControlKeys(server_public={self.server_public!r}, client_public={self.client_public!r})"


def make_keys() -> ControlKeys:
    """Fresh keys."""
    server, client = zmq.curve_keypair(), zmq.curve_keypair()
    return ControlKeys(*(part.decode() for part in (*server, *client)))


def save_keys(keys: ControlKeys, path: str | Path) -> None:
    """Writes a key file that only its owner may read. Raises `ConfigError` when the file exists."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as exc:
        raise ConfigError(f"{path} exists already; remove it to make new keys") from exc
    except OSError as exc:
        raise ConfigError(f"cannot write {path}: {exc.strerror}") from exc
    with os.fdopen(descriptor, "w") as file:
        json.dump(msgspec.structs.asdict(keys), file, indent=2)


def load_keys(path: str | Path) -> ControlKeys:
    """Reads a key file. Raises `ConfigError` when it is missing, readable by others, or broken."""
    try:
        mode = Path(path).stat().st_mode
        text = Path(path).read_bytes()
    except OSError as exc:
        raise ConfigError(
            f"cannot read the key file {path}: {exc.strerror}; make one with `disagg keys`"
        ) from exc
    if mode & 0o077:
        raise ConfigError(f"the key file {path} can be read by others: chmod 600 {path}")
    try:
        return msgspec.json.decode(text, type=ControlKeys)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path} is no key file: {exc}; make one with `disagg keys`") from exc
