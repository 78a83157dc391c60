"""Error responses in the format of the requested API.

OpenAI: `{"error": {message, type, param, code}}`.
Anthropic: `{"type": "error", "error": {type, message}, request_id}`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
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

ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""Anthropic's error types by status; other statuses are `invalid_request_error` below 500, else `api_error`."""
NO_THREADS = "thread_unsupported_request"
"""Code of the refusal of `thread` in Anthropic's API: the client `anthropic` then sends the whole conversation."""


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
        """Returns the JSON body in OpenAI's format."""
        return msgspec.json.encode({"error": self._fields()})

    def anthropic(self, request_id: str) -> dict[str, Any]:
        """Returns the body in Anthropic's format."""
        kind = ANTHROPIC_TYPES.get(self.status, INVALID if self.status < 500 else "api_error")
        fields: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == NO_THREADS:
            fields["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": fields, "request_id": request_id}

    def renamed(self, names: Mapping[str, str]) -> ApiError:
        """Returns the same error for a body whose fields have other names; `names` maps each field to its new name.

        The new names also replace the old ones in the message. `max_tokens` is replaced in every message, because an
        error of another field can mention it.
        """
        if self.param is None:
            return self
        first, dot, rest = self.param.partition(".")
        message = self.message
        for name in {first, "max_tokens"} & names.keys():
            message = re.sub(rf"\b{name}\b", names[name], message)
        return ApiError(
            self.status,
            message,
            param=names.get(first, first) + dot + rest,
            code=self.code,
            headers=self.headers,
        )

    def _fields(self) -> dict[str, Any]:
        return {"message": self.message, "type": self.type, "param": self.param, "code": self.code}


def is_anthropic(path: str) -> bool:
    """Returns whether a path belongs to Anthropic's API."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def error_body(error: ApiError, path: str, request_id: str) -> bytes:
    """Returns the JSON body of an error, in the format of the API that `path` belongs to."""
    return msgspec.json.encode(error.anthropic(request_id)) if is_anthropic(path) else error.body()


class ClientGoneError(Exception):
    """The client has disconnected."""


def bad(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Returns a 400 error; `param` is the name of the invalid field."""
    return ApiError(400, message, param=param, code=code)


def unsupported_type(at: str, kind: object, rest: str) -> ApiError:
    """Returns a 400 error for the field `type` of an object at the path `at`; `rest` ends the message."""
    return bad(f"{at}type", f"{at}type = {kind!r} is not supported{rest}", "unsupported_field")


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
