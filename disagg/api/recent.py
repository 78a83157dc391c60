"""The latest answers, including running ones, for `/status`."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field

from disagg.core.status import Ending, RecentAnswer
from disagg.router.answers import SessionReport

KEPT = 64


@dataclass(slots=True, eq=False)
class Track:
    """Timing of one answer, on `time.monotonic`'s clock; 0 for events that have not happened."""

    id: str
    arrived_s: float
    report: SessionReport = field(default_factory=SessionReport)
    arrived_unix_s: float = field(init=False)
    turn_s: float = 0.0
    first_s: float = 0.0
    ended_s: float = 0.0
    ending: Ending = ""
    error: str = ""

    def __post_init__(self) -> None:
        self.arrived_unix_s = time.time() - (time.monotonic() - self.arrived_s)

    def ended(self, ending: Ending, error: str = "") -> None:
        """Records the end of the answer; later calls have no effect."""
        if not self.ended_s:
            self.ended_s, self.ending, self.error = time.monotonic(), ending, error

    def status(self) -> RecentAnswer:
        """Returns the answer's status."""
        report = self.report
        return RecentAnswer(
            self.id,
            self.arrived_unix_s,
            report.prefill,
            report.decode,
            report.prompt_tokens,
            report.generated_tokens,
            turn_s=self._since(self.turn_s),
            reserved_s=self._since(self.turn_s + report.reserved_s) if report.reserved_s else 0.0,
            ttft_s=self._since(self.first_s),
            transfer_s=report.transfer_s,
            transfer_bytes=report.nbytes,
            ended_s=self._since(self.ended_s),
            ending=self.ending,
            error=self.error,
        )

    def _since(self, moment_s: float) -> float:
        return moment_s - self.arrived_s if moment_s else 0.0


class Recent:
    """Buffer of the latest `KEPT` answers."""

    def __init__(self) -> None:
        self._tracks: deque[Track] = deque(maxlen=KEPT)

    def begin(self, answer_id: str, arrived_s: float) -> Track:
        """Adds a new answer."""
        track = Track(answer_id, arrived_s)
        self._tracks.appendleft(track)
        return track

    def statuses(self) -> tuple[RecentAnswer, ...]:
        """Returns all answers, newest first."""
        return tuple(track.status() for track in self._tracks)
