"""A thin layer over the `redis` package: the commands that the storage needs, with one kind of error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from disagg.core.errors import ConfigError, DisaggError

if TYPE_CHECKING:
    import redis

_READ_BYTES = 1 << 18
"""Size of one socket read. With the client's default of 32 KiB, the threads mostly wait for the GIL."""


class StorageServerError(DisaggError):
    """The storage server cannot be reached, does not answer in time, or answers with an error."""


class RedisClient:
    """Commands to a Redis or Valkey server. Thread-safe: each thread takes a connection from a pool.

    A connection is opened when a command needs it. A connection is closed after a fault, so that a late reply is
    never taken for the reply to a later command.
    """

    def __init__(self, url: str, timeout_s: float, expire_s: int) -> None:
        """`timeout_s`: time limit of connecting, and of a send or receive without progress.

        `expire_s` of 0: no expiry.

        Raises `ConfigError` for a malformed URL, or if the `redis` package is missing.
        """
        try:
            import redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as exc:
            raise ConfigError(
                "a Redis storage needs the `redis` package: pip install 'disagg[redis]', or use a storage in files"
            ) from exc
        try:
            self._redis: redis.Redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 0),  # the breaker decides when to try again
                socket_read_size=_READ_BYTES,
                protocol=2,  # supports the oldest servers too; no feature of version 3 is needed
                driver_info=None,
            )
        except ValueError as exc:  # the error's text may contain the password
            raise ConfigError(
                "the URL of the storage server is malformed: give redis://HOST:PORT/DB, rediss://HOST:PORT/DB for "
                "TLS, or unix:///PATH"
            ) from exc
        self._full_error = redis.exceptions.OutOfMemoryError
        self._expire_s = expire_s

    def read(self, keys: Sequence[bytes]) -> list[bytes | None]:
        """Returns the value of each key; None for a missing key. Raises `StorageServerError`."""
        with _mapped():
            values = self._redis.execute_command("MGET", *keys)  # type: ignore[no-untyped-call]
            if len(values) != len(keys):
                raise StorageServerError(f"the server sent {len(values)} values for {len(keys)} keys")
            return [value if isinstance(value, bytes) else None for value in values]

    def touch(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether it exists; renews existing keys for eviction. Raises `StorageServerError`."""
        command = ("EXPIRE", self._expire_s) if self._expire_s else ("TOUCH",)
        return [reply == 1 for reply in self._pipelined([(command[0], key, *command[1:]) for key in keys])]

    def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Returns for each key whether it exists. Raises `StorageServerError`."""
        return [reply == 1 for reply in self._pipelined([("EXISTS", key) for key in keys])]

    def write(self, keys: Sequence[bytes], values: Sequence[memoryview]) -> tuple[list[bool], bool]:
        """Stores values; returns whether each is stored, and whether the server refused a value for lack of memory.

        Raises `StorageServerError`.
        """
        expiry = ("EX", self._expire_s) if self._expire_s else ()
        each = zip(keys, values, strict=True)
        replies = self._pipelined([("SET", key, value, *expiry) for key, value in each])
        full = any(isinstance(reply, self._full_error) for reply in replies)
        return [not isinstance(reply, Exception) and bool(reply) for reply in replies], full

    def remove(self, keys: Sequence[bytes]) -> None:
        """Removes keys. Raises `StorageServerError`."""
        self._pipelined([("UNLINK", key) for key in keys])

    def close(self) -> None:
        """Closes all connections, also those in use. Raises no error."""
        with _ignored():
            self._redis.connection_pool.disconnect()

    def _pipelined(self, commands: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Sends commands in one pipeline; returns the reply to each, or its error if the server is out of memory.

        Raises `StorageServerError` for any other error, even if only one command fails.
        """
        with _mapped(), self._redis.pipeline(transaction=False) as pipeline:
            for command in commands:
                pipeline.execute_command(*command)  # type: ignore[no-untyped-call]
            replies = pipeline.execute(raise_on_error=False)
            if len(replies) != len(commands):
                raise StorageServerError(
                    f"the server sent {len(replies)} replies to {len(commands)} commands"
                )
            for reply in replies:
                if isinstance(reply, Exception) and not isinstance(reply, self._full_error):
                    raise reply
            return list(replies)


@contextmanager
def _mapped() -> Iterator[None]:
    """Maps all errors to `StorageServerError`, because the client raises various errors for malformed replies."""
    try:
        yield
    except StorageServerError:
        raise
    except Exception as exc:
        raise StorageServerError(f"{type(exc).__name__}: {exc}") from exc


@contextmanager
def _ignored() -> Iterator[None]:
    try:
        with _mapped():
            yield
    except StorageServerError:
        return
