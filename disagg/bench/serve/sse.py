"""Server-sent events (the WHATWG HTML standard, 9.2) out of bytes that are cut anywhere."""

from __future__ import annotations

import re

LIMIT_BYTES = 1 << 20
"""An event that is longer is no token; without a limit a broken server could fill the memory."""

_LINE_END = re.compile(rb"\r\n|\r|\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class SseError(ValueError):
    """What came is no stream of events."""


class SseParser:
    """Payloads of `data` fields; comments, names and ids of events are passed over."""

    def __init__(self) -> None:
        self._rest = b""  # of a line that has not ended
        self._data: list[bytes] = []  # lines of an event that has not ended
        self._data_bytes = 0
        self._after_cr = False  # a line feed that comes next belongs to the line end before it
        self._first_line = True

    @property
    def cut(self) -> bool:
        """Whether an event has begun that has not ended: at the end of a stream, it was cut."""
        return bool(self._rest or self._data)

    def feed(self, chunk: bytes) -> list[bytes]:
        """The events that `chunk` completes, in order. Raises `SseError` beyond `LIMIT_BYTES` of one event."""
        if not chunk:
            return []
        if self._after_cr:
            chunk = chunk.removeprefix(b"\n")
            self._after_cr = False
        *lines, self._rest = _LINE_END.split(self._rest + chunk)
        self._after_cr = chunk.endswith(b"\r")
        events = [event for line in lines if (event := self._line(line)) is not None]
        if len(self._rest) + self._data_bytes > LIMIT_BYTES:
            raise SseError(f"an event of more than {LIMIT_BYTES} bytes")
        return events

    def _line(self, line: bytes) -> bytes | None:
        """Takes a line; returns the event that it ends, if any."""
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
