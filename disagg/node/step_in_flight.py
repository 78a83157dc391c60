"""The step that a rank has launched, and whose results the host has not read yet."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from disagg.core.timeline import Timeline

SampledT = TypeVar("SampledT")


class StepInFlight(Generic[SampledT]):
    """Holds the latest launched step, and ends it when the next one is launched. Used on the compute thread."""

    def __init__(
        self, steps_ahead: int, commit: Callable[[SampledT], None], timeline: Timeline, name: str, lane: str
    ) -> None:
        """`steps_ahead`: 1, or 0 if each step ends at once, before the next one is planned.

        `commit`: waits for the device, and passes the results of a step to the leader. `name`, `lane`: of the step's
        span in the timeline. The span begins at the launch, or at the end of the previous step.
        """
        self._steps_ahead, self._commit = steps_ahead, commit
        self._timeline, self._name, self._lane = timeline, name, lane
        self._launched: tuple[SampledT, float] | None = None
        self._ended_s = 0.0

    def launched(self, sampled: SampledT, began_s: float) -> None:
        """Ends the previous step; without `steps_ahead`, also the launched step.

        `sampled`: the step's results, on the device; `began_s`: time before its launch, on the timeline's clock.
        """
        before, self._launched = self._launched, (sampled, began_s)
        if before is not None:
            self._end(*before)
        if not self._steps_ahead:
            self.end()

    def end(self) -> None:
        """Ends the step in flight, if there is one."""
        last, self._launched = self._launched, None
        if last is not None:
            self._end(*last)

    def _end(self, sampled: SampledT, began_s: float) -> None:
        self._commit(sampled)
        now_s = self._timeline.now()
        self._timeline.record(self._name, self._lane, "", max(began_s, self._ended_s), now_s)
        self._ended_s = now_s
