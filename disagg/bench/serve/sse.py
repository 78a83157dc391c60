"""A parser of server-sent events (the WHATWG HTML standard, 9.2) for bytes cut at any position."""

from __future__ import annotations

import re

LIMIT_BYTES = 1 << 20
"""Largest event: without a limit, a broken server could exhaust the memory."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_DATA = b"data: "
_EVENT_END = b"\n\n"
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseError(ValueError):
    """Raised for bytes that are not an event stream."""


class SseParser:
    """Parses a stream of events into the payloads of `data` fields. Comments, names and ids of events are ignored."""

    def __init__(self) -> None:
        self._rest = b""  # an incomplete line
        self._data: list[bytes] = []  # lines of an incomplete event
        self._data_bytes = 0
        self._after_cr = False  # a following line feed belongs to the previous line end
        self._first_line = True

    @property
    def cut(self) -> bool:
        """Whether the last event is incomplete. At the end of the stream, this means that the stream was cut off."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """Returns the events completed by `chunk`, in order. Raises `SseError` for an event above `LIMIT_BYTES`."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        if (whole := self._whole_events(chunk)) is not None:
            return whole
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        self._after_cr = chunk.endswith(b"\r")
        events = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + self._data_bytes > LIMIT_BYTES:
            raise SseError(f"an event of more than {LIMIT_BYTES} bytes")
        return events

    def _whole_events(self, chunk: bytes) -> list[bytes] | None:
        """Returns the events of a usual chunk: whole events, each a line `data: ...`, with line feeds as line ends.
        Returns None for every other chunk.

        A load has thousands of chunks per second, which this method parses faster than `_line` does.
        """
        if (
            not (chunk.startswith(_DATA) and chunk.endswith(_EVENT_END))
            or self.cut
            or len(chunk) > LIMIT_BYTES
        ):
            return None
        events = chunk[len(_DATA) : -len(_EVENT_END)].split(_EVENT_END + _DATA)
        if b"\r" in chunk or chunk.count(b"\n") != len(_EVENT_END) * len(events):
            return None  # other line ends or fields, or an event of several lines
        self._first_line = False
        return events

    def _line(self, line: bytes) -> bytes | None:
        """Processes a line; returns the event that it completes, if any."""
        if self._first_line:
            line, self._first_line = line.removeprefix(_BYTE_ORDER_MARK), False
        if not line:
            event = b"\n".join(self._data) if self._data else None
            self._data, self._data_bytes = [], 0
            return event
        name, _, value = line.partition(b":")
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
            self._data_bytes += len(value)
        return None
