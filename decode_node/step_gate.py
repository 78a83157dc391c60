"""Tickets of a rank other than rank 0 wait for steps that still use their row's recurrent state.

The leader commits a step when rank 0 has computed it, and may then give a row to another request. Another rank can be
late: after its last collective it may still write states. So it reports a ticket as opened only when no earlier step
of its own uses the row. KV needs no such gate, because a rank writes it before the step's last collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from disagg.node.device import DeviceEvent, is_done, wait_for
from disagg.node.plan import StepPlan
from transport.control import messages as m


class StepGate:
    """Gate in front of `SegmentReceiver.open`. Each method names its thread; a lock guards the plans."""

    def __init__(self, open_ticket: Callable[[m.OpenReceive], None]) -> None:
        """`open_ticket`: opens a ticket; called on the transfer thread."""
        self._open_ticket = open_ticket
        self._lock = threading.Lock()
        self._planned: deque[frozenset[int]] = deque()
        """Rows of plans that have arrived and are not launched, oldest first."""
        self._launched: deque[tuple[frozenset[int], DeviceEvent]] = deque()
        """Rows of launched steps, with the event at the end of each on the device."""
        self._waiting: list[m.OpenReceive] = []
        """Tickets that wait for the launch of a step; used on the transfer thread only."""

    def planned(self, plan: StepPlan) -> None:
        """Records a plan of the leader. Control thread."""
        with self._lock:
            self._planned.append(rows_of(plan))

    def launched(self, event: DeviceEvent) -> None:
        """Records that the oldest plan is launched; `event` marks its end on the device. Compute thread.

        The caller then makes the transfer thread call `retry`.
        """
        with self._lock:
            self._launched.append((self._planned.popleft(), event))
            while is_done(self._launched[0][1]) and len(self._launched) > 1:
                self._launched.popleft()

    def open(self, message: m.OpenReceive) -> None:
        """Opens the ticket: now, after a launched step that uses its row, or in a later `retry`. Transfer thread."""
        row = message.ticket.row
        with self._lock:
            planned = any(row in rows for rows in self._planned)
            events = [event for rows, event in self._launched if row in rows]
        if planned:
            self._waiting.append(message)
            return
        for event in events:
            wait_for(event)  # a part of a step at most
        self._open_ticket(message)

    def retry(self) -> None:
        """Opens the tickets that wait no longer. Transfer thread."""
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.open(message)

    def forget(self, ticket: int) -> None:
        """Drops a ticket that is closed before it was opened. Transfer thread."""
        self._waiting = [message for message in self._waiting if message.ticket.number != ticket]


def rows_of(plan: StepPlan) -> frozenset[int]:
    """Returns the rows whose recurrent states a step reads or writes."""
    copies = [*plan.state_copies, *plan.state_saves]
    copied = [slot for one in copies for slot in (one.source, one.destination)]
    return frozenset([*(work.row for work in plan.work), *copied])
