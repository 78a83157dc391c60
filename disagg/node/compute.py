"""The compute thread, which runs the model's planned steps one after another."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import structlog
import torch

from disagg.core.ports import LayerHook
from disagg.model.batch import SequenceSlice, StepBatch
from disagg.model.sampling.prompt_scores import PromptScores
from disagg.node.device import use_device
from disagg.node.loaded_layers import LayerWaits, hook_with_waits
from disagg.node.plan import StateCopy, StepPlan, Work
from disagg.node.step_recorder import StepRecorder
from disagg.node.step_watch import StepWatch

if TYPE_CHECKING:
    from disagg.model.runner import (
        ModelRunner,
    )  # imports transformers, which a rank without a model need not load

log = structlog.get_logger(__name__)

POLL_S = 0.25


class StepExecutor:
    """Runs the forward pass of a step plan on this rank's part of the model. Owned by the compute thread."""

    def __init__(self, runner: ModelRunner, rows: int) -> None:
        self._runner = runner
        # The leader allocates rows for all ranks, so this rank's table marks every row as used from the start.
        for _ in range(rows):
            runner.req_to_token.alloc()

    def run(
        self,
        plan: StepPlan,
        on_layer: LayerHook | None = None,
        scores: PromptScores | None = None,
        loaded: LayerWaits | None = None,
    ) -> torch.Tensor:
        """Returns the logits of each work item's last token, float32 `[len(plan.work), vocab]`.

        `scores` receives the log-probabilities of prompt tokens that the plan wants. `loaded`: the KV that the plan
        awaits. The step waits for it, for each group of layers if the model computes all sequences of the step layer
        by layer.
        """
        self._update_rows(plan.work)
        batch = _batch(plan)
        if loaded is not None and loaded.by_layer and self._runner.computes_by_layer(batch):
            loaded.before_states()
            on_layer = hook_with_waits(loaded, on_layer)
        elif loaded is not None:
            loaded.before_all()
        self._copy_states(plan.state_copies)
        # By the plan, not by `loaded`: on some ranks the KV may be complete, and all ranks compute in the same way.
        logits = self._runner.forward(batch, on_layer, scores, layerwise=plan.waits)
        self._copy_states(plan.state_saves)
        return logits

    def _copy_states(self, copies: Sequence[StateCopy]) -> None:
        if copies:
            assert self._runner.states is not None, "only a model with recurrent layers has states"
            sources, destinations = [one.source for one in copies], [one.destination for one in copies]
            self._runner.states.pool.copy(sources, destinations)

    def _update_rows(self, works: Sequence[Work]) -> None:
        """Writes the slots of new pages to the request-to-token table, in one copy."""
        table, size = self._runner.req_to_token, self._runner.page_size
        places = [(work.row, work.first_page, work.pages) for work in works if work.pages]
        if places:
            table.set_pages(places, size)
        for work in [work for work in works if work.like >= 0]:
            table.copy_slots(work.like, work.row, min(work.first_page * size, table.max_tokens))


def _batch(plan: StepPlan) -> StepBatch:
    return StepBatch(tuple(map(_slice, plan.work)))


def _slice(work: Work) -> SequenceSlice:
    tokens, saves = tuple(work.tokens), tuple(work.saves)
    targets, likeliest = ((), 0) if work.likeliest is None else (tuple(work.targets), work.likeliest)
    return SequenceSlice(work.row, work.start, tokens, work.prompt_tokens, saves, targets, likeliest)


class PlanQueue:
    """Queue of the leader's plans on a rank other than rank 0. The control thread calls `put`."""

    def __init__(self) -> None:
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()

    def put(self, plan: StepPlan) -> None:
        """Queues the next plan. Plans arrive in order, because the control channel preserves order."""
        self._plans.put(plan)

    @property
    def queued(self) -> bool:
        """Whether a plan is queued."""
        return not self._plans.empty()

    def wake(self) -> None:
        """Makes a blocked `next_plan` return."""
        self._plans.put(None)

    def next_plan(self) -> StepPlan | None:
        """Returns the next plan; None after `POLL_S` without one, or after `wake`."""
        try:
            return self._plans.get(timeout=POLL_S)
        except queue.Empty:
            return None


class ComputeThread:
    """Loops over `next_plan` and `step` until stopped. An exception ends the loop and is passed to `broken`."""

    def __init__(
        self,
        name: str,
        next_plan: Callable[[], StepPlan | None],
        step: Callable[[StepPlan], None],
        end_steps: Callable[[], None],
        broken: Callable[[Exception], None],
        watch: StepWatch,
        recorder: StepRecorder,
    ) -> None:
        """`step` may return while the step is in flight; `end_steps` completes it. `watch` times each step.

        `recorder` starts and stops profiles between two steps, which `watch` does not count.
        """
        self._next_plan, self._step, self._end_steps = next_plan, step, end_steps
        self._broken, self._device = broken, recorder.device
        self._watch, self._recorder = watch, recorder
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"compute-{name}", daemon=True)

    def start(self) -> None:
        """Starts the thread; call once."""
        self._thread.start()

    def stop(self, wake: Callable[[], None], timeout_s: float = 30.0) -> None:
        """Ends the loop after the current step; `wake` makes a blocked `next_plan` return. Raises `TimeoutError`."""
        self._stopping.set()
        wake()
        if self._thread.is_alive():
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                raise TimeoutError(f"{self._thread.name} did not stop within {timeout_s:g} s")

    def _run(self) -> None:
        use_device(self._device)
        plan, recorder = None, self._recorder
        try:
            while not self._stopping.is_set():
                with recorder.part("plan"):
                    plan = self._next_plan()
                works = plan is not None and bool(plan.work)
                recorder.between(works)
                with self._watch.watched(), recorder.step(works):
                    if plan is not None:
                        self._step(plan)
                    else:
                        self._end_steps()
            with self._watch.watched():
                self._end_steps()  # afterwards the device uses no memory of the rank
        except Exception as exc:
            if not self._stopping.is_set():
                log.exception("step_failed", thread=self._thread.name, step=plan.step if plan else None)
            self._broken(exc)
        finally:
            recorder.close()
