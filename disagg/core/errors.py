"""The error tree. Every message names the fault, its place and the remedy.

`retryable`: the same request may succeed on another group or later. `exit_code`: the exit status of the command line,
2 for invalid user input, 1 otherwise. `code`: the stable name that crosses the wire
(`transport.control.messages.Failed`) and that clients may rely on.
"""

from __future__ import annotations

from typing import ClassVar


class DisaggError(Exception):
    """Root of all errors of this project."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigError(DisaggError, ValueError):
    """Invalid user input: flags, file, environment, model or prompt."""

    code = "config"
    exit_code = 2


class UnsupportedModelError(ConfigError):
    """The checkpoint, or its split over the configured number of ranks, is not supported."""

    code = "unsupported_model"


class PromptTooLongError(ConfigError):
    """The prompt and its answer exceed the model's context or the KV pool."""

    code = "prompt_too_long"


class HandshakeError(DisaggError):
    """Two groups cannot exchange KV; the message names both sides' values."""

    code = "handshake"
    exit_code = 2


class MismatchError(DisaggError):
    """An answer differs from its reference: a transfer or a computation produced wrong bytes."""

    code = "mismatch"


class BusyError(DisaggError):
    """The group or the server has no capacity for another request now."""

    code = "busy"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(DisaggError):
    """One request ended without its answer; other requests continue."""

    code = "request"


class InvalidRequestError(RequestError):
    """The prompt or the sampling parameters of a request are invalid."""

    code = "invalid_request"
    exit_code = 2

    def __init__(self, message: str, param: str | None = None) -> None:
        """`param` names the field at fault, None if the fault has no single field."""
        super().__init__(message)
        self.param = param


class RequestInUseError(InvalidRequestError):
    """Another request with the same id is running."""

    code = "request_in_use"


class AbortedError(RequestError):
    """The client or an operator aborted the request."""

    code = "aborted"


class RequestTimeoutError(RequestError):
    """The request's deadline passed."""

    code = "timeout"
    retryable = True


class TransportError(RequestError):
    """A transfer failed: a send, a receive, or the connection under it."""

    code = "transport"
    retryable = True


class PeerLostError(TransportError):
    """The peer of a transfer or of a request is lost."""

    code = "peer_lost"


class NotLinkedError(PeerLostError):
    """The two groups of a request are not linked: the network between them is cut, or linking is still under way."""

    code = "not_linked"


class ChecksumError(TransportError):
    """A segment arrived damaged twice: memory or the network between two ranks is faulty."""

    code = "checksum"


class ProtocolError(RequestError):
    """A peer violated the protocol; only the request named by the message ends."""

    code = "protocol"


class InvariantError(DisaggError, AssertionError):
    """A data structure's state is inconsistent, which is a bug. `check()` methods raise this error with a state
    dump."""

    code = "invariant"


def error_classes() -> dict[str, type[DisaggError]]:
    """Returns the exception class of each `code`, to convert a received `Failed` message into an exception."""
    found: dict[str, type[DisaggError]] = {}
    pending: list[type[DisaggError]] = [DisaggError]
    while pending:
        cls = pending.pop()
        found.setdefault(cls.code, cls)
        pending.extend(cls.__subclasses__())
    return found


def error_from_code(code: str, message: str) -> DisaggError:
    """Returns the exception that a peer reported as `code`; `RequestError` for an unknown code."""
    return error_classes().get(code, RequestError)(message)


def first_line(exc: BaseException) -> str:
    """Returns the first line of an error's message; the name of its type if the message is empty."""
    return str(exc).strip().partition("\n")[0] or type(exc).__name__
