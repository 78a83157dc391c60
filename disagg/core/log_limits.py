"""Limits of log lines that peers can cause: so many a minute for each kind and peer, then one line with the rest.

Limited are the lines of `LIMITED`: what a peer, a client or a stranger causes by sending something wrong, again and
again. Never limited are lines about the own process, its groups and its start, and errors of single requests that
were accepted: each of those is a fault of its own.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from disagg.core.errors import InvariantError

WINDOW_S = 60.0
PER_PEER_LINES = 20
"""Of one kind and peer in a window."""
PER_KIND_LINES = 100
"""Of one kind in a window, whatever the peers: a peer chooses its name. It bounds the books too."""
MAX_VALUE_CHARS = 500
"""Of a value in a limited line; peers choose many of them."""
_MAX_NAME_CHARS = 100

LIMITED = {
    ("warning", "bad_control_frame"): "peer",
    ("warning", "unexpected_message"): "peer",
    ("warning", "strange_letter"): "peer",
    ("warning", "digest_not_read"): "peer",
    ("warning", "peer_lost"): "peer",
    ("warning", "control_handshake_failed"): "peer",
    ("warning", "control_client_refused"): "reason",
    ("warning", "library"): "said",
    ("error", "control_call_failed"): "channel",
    ("error", "control_turn_failed"): "channel",
    ("error", "fence_not_proven"): "peer",
    ("info", "control_peer_lost"): "peer",
    ("warning", "tls_broken"): "peer",
    ("error", "tls_fault"): "peer",
    ("info", "tls_connected"): "peer",
    ("info", "tls_refused"): "address",
    ("info", "pool_not_opened"): "peer",
    ("info", "pool_not_offered"): "peer",
    ("info", "pool_opened"): "peer",
    ("info", "pool_refused"): "peer",
    ("info", "router_joined"): "router",
    ("info", "router_lost"): "router",
    ("info", "scale_asked"): "operator",
    ("info", "request"): "client",  # of refused requests (4xx), no others
}
"""Level and event of the limited lines, and the field that names the peer; a line without it is not limited."""

Event = MutableMapping[str, Any]
StartTimer = Callable[[float, Callable[[], None]], None]


def start_timer(after_s: float, call: Callable[[], None]) -> None:
    """Calls back once, on a thread of its own that does not keep the process alive."""
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    timer.start()


def _warn(event: str, **fields: Any) -> None:
    """Looks the logger up when it writes: limits are made before the logs are configured."""
    structlog.get_logger(__name__).warning(event, **fields)


@dataclass(slots=True)
class _Book:
    """One kind's lines in its present window."""

    ends_s: float
    written: int = 0
    by_peer: dict[str, int] = field(default_factory=dict)
    """Lines written; at most `PER_KIND_LINES` peers have any."""
    left_out: int = 0
    last_left_out: str = ""


class LogLimits:
    """A structlog processor, behind `add_log_level`. For any thread."""

    def __init__(
        self,
        say: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: StartTimer = start_timer,
    ) -> None:
        """`say(event, **fields)` writes the line about what was left out."""
        self._say = say or _warn
        self._clock, self._start = clock, start
        self._lock = threading.Lock()
        self._books: dict[tuple[str, str], _Book] = {}
        self._timer_runs = False

    def __call__(self, logger: object, method: str, event: Event) -> Event:
        """The event, its values cut where it is a limited one. Raises `structlog.DropEvent` for one too many."""
        kind = (str(event.get("level", method)), str(event.get("event")))
        named_by = LIMITED.get(kind)
        if named_by is None or named_by not in event:
            return event
        peer = str(event[named_by])[:_MAX_NAME_CHARS]
        self.flush()
        with self._lock:
            if not self._take(kind, peer):
                raise structlog.DropEvent
        for name, value in event.items():
            if isinstance(value, str) and len(value) > MAX_VALUE_CHARS:
                event[name] = f"{value[:MAX_VALUE_CHARS]}... ({len(value)} characters)"
        return event

    def flush(self) -> None:
        """Ends the windows that are over; says what was left out of them."""
        with self._lock:
            now_s = self._clock()
            over = [(kind, book) for kind, book in self._books.items() if now_s >= book.ends_s]
            for kind, _ in over:
                del self._books[kind]
        for (_, event), book in over:
            if book.left_out:
                self._say(
                    "log_lines_left_out",
                    of=event,
                    lines=book.left_out,
                    last_peer=book.last_left_out,
                    in_s=WINDOW_S,
                )

    def check(self) -> None:
        """Raises `InvariantError` unless the books are within their bounds."""
        with self._lock:
            for kind, book in self._books.items():
                sound = (
                    kind in LIMITED
                    and sum(book.by_peer.values()) == book.written <= PER_KIND_LINES
                    and max(book.by_peer.values()) <= PER_PEER_LINES
                )
                if not sound:
                    raise InvariantError(f"log limits: {kind}: {book}")

    def _take(self, kind: tuple[str, str], peer: str) -> bool:
        """Whether one more line may be written; counts it either way."""
        now_s = self._clock()
        book = self._books.get(kind)
        if book is None:
            book = self._books[kind] = _Book(now_s + WINDOW_S)
        written = book.by_peer.get(peer, 0)
        if book.written < PER_KIND_LINES and written < PER_PEER_LINES:
            book.written += 1
            book.by_peer[peer] = written + 1
            return True
        book.left_out += 1
        book.last_left_out = peer
        self._plan_flush(now_s)
        return False

    def _plan_flush(self, now_s: float) -> None:
        """A flood may be the last thing that is logged: a timer says what was left out of it."""
        if not self._timer_runs:
            ends_s = min(book.ends_s for book in self._books.values() if book.left_out)
            # Without a thread left, the next limited line plans it again: a flood must not end who logs it.
            with contextlib.suppress(RuntimeError):
                self._start(max(0.0, ends_s - now_s), self._on_timer)
                self._timer_runs = True

    def _on_timer(self) -> None:
        self.flush()
        with self._lock:
            self._timer_runs = False
            if any(book.left_out for book in self._books.values()):
                self._plan_flush(self._clock())
