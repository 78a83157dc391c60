"""Error responses in OpenAI's format: `{"error": {message, type, param, code}}`."""

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
"""Status for logs and metrics when the client disconnected before its reply, as in nginx; never sent."""


class ApiError(Exception):
    """An error with its HTTP status and the fields of its body. `param` is the name of the invalid field."""

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
        """OpenAI's error type, derived from the status."""
        if self.status == 429:
            return "rate_limit_error"
        return INVALID if self.status < 500 else SERVER

    def body(self) -> bytes:
        """Returns the JSON body."""
        return msgspec.json.encode({"error": self._fields()})

    def _fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


class ClientGoneError(Exception):
    """The client has disconnected."""


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Returns a 400 error; `param` is the name of the invalid field."""
    return ApiError(400, message, param=param, code=code)


def retry_after(seconds: float) -> dict[str, str]:
    """Returns the Retry-After header: whole seconds, at least 1."""
    return {"Retry-After": str(max(1, math.ceil(seconds)))}


def api_error(error: DisaggError) -> ApiError:
    """Converts an error of this project to an error response."""
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
        case InvalidRequestError():
            return bad(error.param, message, code=error.code)
        case ConfigError():
            return bad(None, message, code=error.code)
        case RequestTimeoutError():
            return ApiError(504, message, code=error.code)
        case TransportError() | AbortedError():
            return ApiError(503, message, code=error.code, headers=retry_after(1))
        case _:
            return ApiError(500, message, code=error.code)
