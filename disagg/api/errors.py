"""What a client is told when something is wrong, in OpenAI's shape: `{"error": {message, type, param, code}}`."""

from __future__ import annotations

import math
from typing import Any

import msgspec

from disagg.core.errors import (
    AbortedError,
    BusyError,
    ConfigError,
    DisaggError,
    InvalidRequestError,
    PromptTooLongError,
    RequestInUseError,
    RequestTimeoutError,
    TransportError,
)

INVALID = "invalid_request_error"
SERVER = "server_error"
CLIENT_GONE = 499
"""nginx' status for a client that left before its answer; no client ever sees it."""


class ApiError(Exception):
    """An HTTP status and what stands in the body. `param` names the field at fault."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        """OpenAI's word for the kind of error, which follows from the status."""
        if self.status == 429:
            return "rate_limit_error"
        return INVALID if self.status < 500 else SERVER

    def body(self) -> bytes:
        """The JSON that says it."""
        return msgspec.json.encode({"error": self._fields()})

    def _fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """A 400 that names the field."""
    return ApiError(400, message, param=param, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    """The header of that name: whole seconds, 1 at least."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def api_error(error: DisaggError) -> ApiError:
    """What a client hears of an error of ours."""
    message = str(error)
    match error:
        case BusyError():
            return ApiError(
                429, message, code="rate_limit_exceeded", headers=retry_after(error.retry_after_s)
            )
        case PromptTooLongError():
            return bad(None, message, code="context_length_exceeded")
        case RequestInUseError():
            return ApiError(409, message, code=error.code)
        case ConfigError() | InvalidRequestError():
            return bad(None, message, code=error.code)
        case RequestTimeoutError():
            return ApiError(504, message, code=error.code)
        case TransportError() | AbortedError():
            return ApiError(503, message, code=error.code, headers=retry_after(1))
        case _:
            return ApiError(500, message, code=error.code)
