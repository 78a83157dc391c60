"""Rate limits for log lines that peers can cause.

The number of lines per event, peer and minute is limited; one summary line counts the dropped lines.

`LIMITED` lists the limited events: invalid input from a peer or a client, or faults of a storage, can cause these
events repeatedly. Other events of this process and its groups, and errors of accepted requests, are never limited.
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
"""Largest number of lines of one event and one peer per window."""
PER_KIND_LINES = 100
"""Largest number of lines of one event per window, over all peers; also bounds the number of stored peer names."""
MAX_VALUE_CHARS = 500
"""Longest value in a limited line, because peers can choose values of any length."""
_MAX_NAME_CHARS = 100

LIMITED = {
    ("warning", "bad_control_frame"): "peer",
    ("warning", "unexpected_message"): "peer",
    ("warning", "active_message_dropped"): "peer",
    ("warning", "digest_not_read"): "peer",
    ("warning", "peer_lost"): "peer",
    ("warning", "data_connection_broken"): "peer",
    ("warning", "control_handshake_failed"): "peer",
    ("warning", "control_client_refused"): "reason",
    ("warning", "library"): "said",
    ("error", "control_call_failed"): "channel",
    ("error", "control_turn_failed"): "channel",
    ("error", "fence_not_proven"): "peer",
    ("info", "control_peer_lost"): "peer",
    ("info", "control_peer_silent"): "peer",
    ("warning", "tls_broken"): "peer",
    ("error", "tls_fault"): "peer",
    ("info", "tls_connected"): "peer",
    ("info", "tls_refused"): "address",
    ("info", "tls_channel_replaced"): "peer",
    ("info", "pool_not_opened"): "peer",
    ("info", "pool_not_offered"): "peer",
    ("info", "pool_opened"): "peer",
    ("info", "pool_refused"): "peer",
    ("info", "no_completion_words"): "peer",
    ("info", "router_joined"): "router",
    ("info", "router_lost"): "router",
    ("info", "scale_requested"): "operator",
    ("warning", "page_peer_lost"): "peer",
    ("warning", "page_peer_not_connected"): "peer",
    ("warning", "page_peer_refused"): "peer",
    ("warning", "item_events_not_read"): "peer",
    ("warning", "storage_paused"): "storage",
    ("info", "storage_resumed"): "storage",
    ("warning", "storage_page_corrupt"): "storage",
    ("warning", "storage_segment_unreadable"): "storage",
    ("warning", "storage_folder_unreadable"): "storage",
    ("warning", "storage_index_not_written"): "storage",
    ("warning", "storage_pages_not_kept"): "storage",
    ("error", "storage_fetch_failed"): "error",
    ("error", "storage_write_failed"): "error",
    ("error", "cache_store_failed"): "error",
    ("warning", "no_host_memory"): "error",
    ("info", "request"): "client",  # refused requests (4xx) only
}
"""Field that names the peer, by level and event of a limited line. Lines without the field are not limited."""

Event = MutableMapping[str, Any]
StartTimer = Callable[[float, Callable[[], None]], None]


def start_timer(after_s: float, call: Callable[[], None]) -> None:
    """Calls `call` once after `after_s`, on a daemon thread."""
    timer = threading.Timer(after_s, call)
    timer.daemon = True
    timer.start()


def _warn(event: str, **fields: Any) -> None:
    """Logs a warning. The logger is created here, because `configure` constructs `LogLimits` before it sets up
    loggers."""
    structlog.get_logger(__name__).warning(event, **fields)


@dataclass(slots=True)
class _LineCounts:
    """Counts of one event's lines in the current window."""

    ends_s: float
    written: int = 0
    by_peer: dict[str, int] = field(default_factory=dict)
    """Lines written per peer, at most `PER_KIND_LINES` peers."""
    left_out: int = 0
    last_left_out: str = ""


class LogLimits:
    """structlog processor that drops lines over the limits; must run after `add_log_level`. Thread-safe."""

    def __init__(
        self,
        say: Callable[..., None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        start: StartTimer = start_timer,
    ) -> None:
        """`say(event, **fields)` writes the summary line of dropped lines."""
        self._say = say or _warn
        self._clock, self._start = clock, start
        self._lock = threading.Lock()
        self._windows: dict[tuple[str, str], _LineCounts] = {}
        self._timer_runs = False

    def __call__(self, logger: object, method: str, event: Event) -> Event:
        """Returns the event; cuts long values of limited events. Raises `structlog.DropEvent` over the limit."""
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
        """Ends expired windows and writes their summary lines."""
        with self._lock:
            now_s = self._clock()
            over = [(kind, window) for kind, window in self._windows.items() if now_s >= window.ends_s]
            for kind, _ in over:
                del self._windows[kind]
        for (_, event), window in over:
            if window.left_out:
                self._say(
                    "log_lines_left_out",
                    of=event,
                    lines=window.left_out,
                    last_peer=window.last_left_out,
                    in_s=WINDOW_S,
                )

    def check(self) -> None:
        """Raises `InvariantError` unless all windows are within their bounds."""
        with self._lock:
            for kind, window in self._windows.items():
                sound = (
                    kind in LIMITED
                    and sum(window.by_peer.values()) == window.written <= PER_KIND_LINES
                    and max(window.by_peer.values()) <= PER_PEER_LINES
                )
                if not sound:
                    raise InvariantError(f"log limits: {kind}: {window}")

    def _take(self, kind: tuple[str, str], peer: str) -> bool:
        """Counts a line; returns whether the line is within the limits and may be written."""
        now_s = self._clock()
        window = self._windows.get(kind)
        if window is None:
            window = self._windows[kind] = _LineCounts(now_s + WINDOW_S)
        written = window.by_peer.get(peer, 0)
        if window.written < PER_KIND_LINES and written < PER_PEER_LINES:
            window.written += 1
            window.by_peer[peer] = written + 1
            return True
        window.left_out += 1
        window.last_left_out = peer
        self._plan_flush(now_s)
        return False

    def _plan_flush(self, now_s: float) -> None:
        """Starts a timer that writes the summary line even if no later line triggers a flush."""
        if not self._timer_runs:
            ends_s = min(window.ends_s for window in self._windows.values() if window.left_out)
            # If no thread can be started, the next limited line tries again; logging must not raise.
            with contextlib.suppress(RuntimeError):
                self._start(max(0.0, ends_s - now_s), self._on_timer)
                self._timer_runs = True

    def _on_timer(self) -> None:
        self.flush()
        with self._lock:
            self._timer_runs = False
            if any(window.left_out for window in self._windows.values()):
                self._plan_flush(self._clock())
