"""ASGI middleware before the routes: request ids, limits of request heads, API keys, admission, logs and counts.

Under overload, most requests end here and must cost little. The middleware rejects them before their body is read,
and logs one line per second for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from disagg.api.errors import CLIENT_GONE, ApiError, api_error, is_anthropic
from disagg.api.exchange import SESSION, STATE, TIMEOUT, Exchange, exchange_for, session_id, timeout_s
from disagg.api.keys import check_key
from disagg.api.metrics import Metrics
from disagg.api.responses import error_response
from disagg.api.tracing import Tracing
from disagg.core.config.read import ApiConfig
from disagg.core.errors import BusyError

log = structlog.get_logger(__name__)

OPEN = frozenset({"/", "/health", "/ready", "/metrics"})
"""Paths that need no API key."""
OFTEN = OPEN | {"/status"}
"""Frequently polled paths, logged at level debug."""
ID_PREFIXES = {
    "/v1/completions": "cmpl-",
    "/v1/chat/completions": "chatcmpl-",
    "/v1/responses": "resp_",
    "/v1/messages": "msg_",
}
"""Prefixes of the request ids that the server generates, by path. The id is also the `id` of the reply."""
ANSWERING = frozenset(ID_PREFIXES)
ID_HEADERS = (b"x-request-id", b"request-id")
"""Headers of a response with the request's id; the second one only in Anthropic's API."""
MAX_REASON_CHARS = 500
REFUSALS_S = 1.0
"""Shortest interval between two log lines with the number of rejected requests."""
OUTCOMES = {CLIENT_GONE: "aborted", 408: "timeout", 429: "busy", 503: "unavailable", 504: "timeout"}


class Edge:
    """ASGI middleware around the routes."""

    def __init__(
        self,
        app: ASGIApp,
        config: ApiConfig,
        keys: tuple[bytes, ...],
        metrics: Metrics,
        tracing: Tracing | None,
        check_capacity: Callable[[], None],
    ) -> None:
        """`check_capacity` raises `ApiError` or `BusyError` if no request can be admitted now."""
        self._app, self._config, self._keys, self._metrics = app, config, keys, metrics
        self._tracing, self._check_capacity = tracing, check_capacity
        self._refused, self._logged_s = 0, 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        prefix = ID_PREFIXES.get(scope["path"], "")
        exchange = exchange_for(headers.get(b"x-request-id"), prefix, self._config.request_timeout_s)
        scope["state"] = {STATE: exchange}
        if self._tracing is not None and scope["path"] in ANSWERING:
            exchange.trace = self._tracing.begin(headers, scope["path"], exchange.request_id)
        status, anthropic = 0, is_anthropic(scope["path"])
        id_headers = ID_HEADERS if anthropic else ID_HEADERS[:1]

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                ids = [(name, exchange.request_id.encode()) for name in id_headers]
                message = {**message, "headers": [*message.get("headers", ()), *ids]}
            await send(message)

        try:
            self._check_head(scope)
            if scope["path"] not in OPEN:
                plain = headers.get(b"x-api-key") if anthropic else None
                check_key(self._keys, headers.get(b"authorization"), plain)
            # After the key check: a request without a key must not reveal or affect the load.
            if scope["path"] in ANSWERING and scope["method"] == "POST":
                self._check_capacity()
            exchange.timeout_s = timeout_s(headers.get(TIMEOUT.encode()), exchange.timeout_s)
            exchange.session = session_id(headers.get(SESSION.encode()))
            await self._app(scope, receive, send_with_id)
        except (ApiError, BusyError) as exc:
            error = api_error(exc) if isinstance(exc, BusyError) else exc
            exchange.reason = error.message
            response = error_response(error, scope["path"], exchange.request_id)
            await response(scope, receive, send_with_id)
        except Exception:
            log.exception("request_failed", request_id=exchange.request_id, path=scope["path"])
        finally:
            self._account(scope, exchange, status)

    def _check_head(self, scope: Scope) -> None:
        lines = [len(name) + len(value) + 4 for name, value in scope["headers"]]  # 4: ": " and the line's end
        lines.append(len(scope["raw_path"]) + len(scope["query_string"]) + len("OPTIONS  HTTP/1.1\r\n"))
        for nbytes, limit_bytes, what in (
            (max(lines), self._config.max_line_bytes, "a header or the request line"),
            (sum(lines), self._config.max_header_bytes, "the request's head"),
        ):
            if nbytes > limit_bytes:
                raise head_too_large(what, limit_bytes)

    def _account(self, scope: Scope, exchange: Exchange, status: int) -> None:
        path, outcome = scope["path"], _outcome(exchange.ended or status)
        if path in ANSWERING:
            self._metrics.requests.labels(outcome).inc()
        if exchange.trace is not None:
            exchange.trace.end(exchange.ended or status, outcome)
        if outcome == "busy":
            self._log_refused()
        refused = outcome == "refused"
        say = log.debug if path in OFTEN or outcome == "busy" else log.info
        say(
            "request",
            request_id=exchange.request_id,
            method=scope["method"],
            path=path,
            status=status,
            outcome=outcome,
            seconds=round(time.monotonic() - exchange.arrived_s, 4),
            **({"reason": _plain(exchange.reason)} if exchange.reason else {}),
            **({"client": _client(scope)} if refused else {}),
            **exchange.words,
        )

    def _log_refused(self) -> None:
        """Logs the number of rejected requests, at most once per `REFUSALS_S`."""
        self._refused += 1
        now_s = time.monotonic()
        if now_s - self._logged_s >= REFUSALS_S:
            log.warning("busy", refused=self._refused)
            self._refused, self._logged_s = 0, now_s


def _client(scope: Scope) -> str:
    """Returns the client's address; the rate of log lines is limited for each address."""
    client = scope.get("client")
    return str(client[0]) if client else "unknown"


def _plain(message: str) -> str:
    """Returns the message as one line of printable characters, because the message may quote bytes of the request."""
    return "".join(one if one.isprintable() else " " for one in message)[:MAX_REASON_CHARS]


def _outcome(status: int) -> str:
    if status in OUTCOMES:
        return OUTCOMES[status]
    return "ok" if 200 <= status < 400 else "refused" if 400 <= status < 500 else "error"


def head_too_large(what: str, limit_bytes: int) -> ApiError:
    """Returns the 431 error for a part of a request's head that exceeds `limit_bytes`."""
    return ApiError(
        431,
        f"{what} is larger than the limit of {limit_bytes} bytes",
        code="headers_too_large",
        headers={"Connection": "close"},
    )
