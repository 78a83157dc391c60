"""The steps of a rank whose group samples a token for each answer; with `async_steps`, one step ahead of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from disagg.core.timeline import Timeline
from disagg.model.sampled_tokens import SampledTokenBuffer
from disagg.node.plan import StepPlan
from disagg.node.step_in_flight import StepInFlight
from disagg.node.step_recorder import StepRecorder


class LaunchedStep(Protocol):
    """A step whose tokens are sampled on the device."""

    def shared_tokens(self) -> torch.Tensor | None:
        """Returns the token of each work item on the device; None if no work item has one."""


StepT = TypeVar("StepT", bound=LaunchedStep)
CommittedT = TypeVar("CommittedT", contravariant=True)


class SamplingLeader(Protocol[CommittedT]):
    """The leader's part in sampled steps."""

    def is_constrained(self, plan: StepPlan) -> bool:
        """Returns whether masks of the latest plan depend on the tokens of the previous step."""

    def commit(self, step: CommittedT) -> None:
        """Ends the oldest step in flight: waits for the device."""


class SampledSteps(Generic[StepT]):
    """Samples a rank's launched steps, and ends each one later; see `StepInFlight`. Used on the compute thread."""

    def __init__(
        self,
        leader: SamplingLeader[StepT] | None,
        tokens: SampledTokenBuffer,
        recorder: StepRecorder,
        timeline: Timeline,
        name: str,
        lane: str,
        steps_ahead: int,
    ) -> None:
        """`leader`: None on ranks other than 0, which receive the tokens of rank 0 in `tokens`. `name`, `lane`,
        `steps_ahead`: see `StepInFlight`."""
        self._leader, self._tokens, self._recorder = leader, tokens, recorder
        self._in_flight: StepInFlight[StepT | None] = StepInFlight(
            steps_ahead, self._commit, timeline, name, lane
        )

    def launched(self, plan: StepPlan, began_s: float, sample: Callable[[], StepT] | None) -> None:
        """Samples a step whose forward pass is launched, and ends the previous step.

        A step with constrained answers is sampled after the end of the previous step, whose tokens determine the
        masks. The device computes the step meanwhile. `began_s`: see `StepInFlight.launched`. `sample`: launches the
        sampling; None on ranks other than 0.
        """
        if self._leader is not None and self._leader.is_constrained(plan):
            self.end()
        with self._recorder.part("sample"):
            step = sample() if sample is not None else None
        if plan.shared:
            self._tokens.share(step.shared_tokens() if step is not None else None, len(plan.work))
        self._in_flight.launched(step, began_s)

    def end(self) -> None:
        """Ends the step in flight, if there is one."""
        self._in_flight.end()

    def _commit(self, step: StepT | None) -> None:
        if self._leader is not None and step is not None:
            with self._recorder.part("commit"):
                self._leader.commit(step)
