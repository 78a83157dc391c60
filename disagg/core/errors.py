"""The error tree. Every error says what went wrong, where, and how to mend it.

`retryable` tells the router whether the same request may succeed elsewhere or later. `exit_code` is what the
command line ends with: 2 when the user's input is at fault, 1 otherwise. `code` is the stable word that
crosses the wire (`transport.messages.Failed`), so that a client can act on it without reading prose.
"""

from __future__ import annotations

from typing import ClassVar


class DisaggError(Exception):
    """Root of every error this project raises on purpose."""

    code: ClassVar[str] = "internal"
    retryable: ClassVar[bool] = False
    exit_code: ClassVar[int] = 1


class ConfigError(DisaggError, ValueError):
    """The user's input (flags, file, environment, model, prompt) cannot be used."""

    code = "config"
    exit_code = 2


class UnsupportedModelError(ConfigError):
    """The checkpoint, or its split over the asked number of ranks, is not supported."""

    code = "unsupported_model"


class PromptTooLongError(ConfigError):
    """The prompt and its answer do not fit the model's context or the pool."""

    code = "prompt_too_long"


class HandshakeError(DisaggError):
    """Two groups cannot exchange KV; the message names both sides' values."""

    code = "handshake"
    exit_code = 2


class MismatchError(DisaggError):
    """An answer differs from the one that it was compared with: wrong bytes were moved, or computed on."""

    code = "mismatch"


class BusyError(DisaggError):
    """No room for another request now."""

    code = "busy"
    retryable = True

    def __init__(self, message: str, retry_after_s: float = 0.1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestError(DisaggError):
    """One request ended without its answer; others go on."""

    code = "request"


class InvalidRequestError(RequestError):
    """A request asks for what cannot be: its prompt or its sampling parameters are at fault."""

    code = "invalid_request"
    exit_code = 2


class RequestInUseError(InvalidRequestError):
    """A request has the id of another one that is under way."""

    code = "request_in_use"


class AbortedError(RequestError):
    """The request was aborted by its client or by an operator."""

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
    """The other side of a transfer or a hand-over is gone."""

    code = "peer_lost"


class ChecksumError(TransportError):
    """A segment arrived damaged twice: memory or the wire between two ranks is damaged."""

    code = "checksum"


class ProtocolError(RequestError):
    """A peer sent what the protocol does not allow; only the request it names is ended."""

    code = "protocol"


class InvariantError(DisaggError, AssertionError):
    """A structure's `check()` found its own state broken: a bug of ours. The message dumps the state."""

    code = "invariant"


def error_classes() -> dict[str, type[DisaggError]]:
    """Maps each `code` to its class, for turning a `Failed` message back into an exception."""
    found: dict[str, type[DisaggError]] = {}
    pending: list[type[DisaggError]] = [DisaggError]
    while pending:
        cls = pending.pop()
        found.setdefault(cls.code, cls)
        pending.extend(cls.__subclasses__())
    return found


def error_from_code(code: str, message: str) -> DisaggError:
    """The exception that a peer meant by `code`; unknown codes become `RequestError`."""
    return error_classes().get(code, RequestError)(message)
