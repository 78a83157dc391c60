"""Delays tickets on ranks other than 0 while an earlier step still uses the recurrent state of the ticket's row.

The leader commits a step when rank 0 has computed the step, and may then assign a row to another request. Another
rank can be late and still write states after the step's last collective. Such a rank therefore opens a ticket only
when none of its earlier steps uses the row. KV needs no gate, because ranks write KV before the last collective.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from disagg.node.device import DeviceEvent, is_done, wait_for
from disagg.node.plan import StepPlan
from transport.control import messages as m


class StepGate:
    """Delays calls of `SegmentReceiver.open`. Three threads call the methods; a lock guards the plans."""

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
        """Records a plan that the leader has sent. Called on the control thread."""
        with self._lock:
            self._planned.append(rows_of(plan))

    def launched(self, event: DeviceEvent) -> None:
        """Records that the oldest plan is launched; `event` marks its end on the device.

        Called on the compute thread. The caller then makes the transfer thread call `retry`.
        """
        with self._lock:
            self._launched.append((self._planned.popleft(), event))
            while is_done(self._launched[0][1]) and len(self._launched) > 1:
                self._launched.popleft()

    def open(self, message: m.OpenReceive) -> None:
        """Opens a ticket once no earlier step uses its row. Called on the transfer thread.

        Blocks until the launched steps that use the row have ended. If a plan that uses the row is not launched yet,
        returns at once, and a later `retry` opens the ticket.
        """
        row = message.ticket.row
        with self._lock:
            planned = any(row in rows for rows in self._planned)
            events = [event for rows, event in self._launched if row in rows]
        if planned:
            self._waiting.append(message)
            return
        for event in events:
            wait_for(event)  # for less than the duration of a step
        self._open_ticket(message)

    def retry(self) -> None:
        """Opens the delayed tickets whose row no waiting plan uses. Called on the transfer thread."""
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self.open(message)

    def forget(self, ticket: int) -> None:
        """Drops a delayed ticket, because it is closed. Called on the transfer thread."""
        self._waiting = [message for message in self._waiting if message.ticket.number != ticket]


def rows_of(plan: StepPlan) -> frozenset[int]:
    """Returns the rows whose recurrent states a step reads or writes."""
    copies = [*plan.state_copies, *plan.state_saves]
    copied = [slot for one in copies for slot in (one.source, one.destination)]
    return frozenset([*(work.row for work in plan.work), *copied])
