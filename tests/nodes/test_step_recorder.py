"""The recorder of a rank's steps, without a rank: faults of the profiler end the recording only."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from conditions import PATIENCE_S

from disagg.core.config.read import MetricsConfig
from disagg.core.profile.trace import WARM_STEPS
from disagg.core.profile.types import ProfileOptions
from disagg.core.types import RequestKey
from disagg.node import step_recorder
from disagg.node.compute import ComputeThread
from disagg.node.plan import StepPlan, Work
from disagg.node.step_recorder import StepRecorder
from disagg.node.step_watch import StepWatch
from transport.control import messages as m

CPU = torch.device("cpu")
KEY = RequestKey("p")


class Sent:
    """What a recorder has sent, and a condition for it."""

    def __init__(self) -> None:
        self.messages: list[m.Message] = []
        self._came = threading.Condition()

    def __call__(self, peer: str, message: m.Message) -> None:
        assert peer == "router"
        with self._came:
            self.messages.append(message)
            self._came.notify_all()

    def wait_for(self, kind: type[m.Message]) -> Any:
        """The first message of the kind."""
        with self._came:
            assert self._came.wait_for(
                lambda: any(isinstance(one, kind) for one in self.messages), PATIENCE_S
            )
            return next(one for one in self.messages if isinstance(one, kind))


class Time:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def recorder_in(folder: Path, time: Time | None = None) -> tuple[StepRecorder, Sent]:
    sent = Sent()
    clock: Any = time or Time()
    return StepRecorder("decode r0", CPU, MetricsConfig(profile_folder=str(folder)), sent, clock), sent


def steps(recorder: StepRecorder, count: int) -> None:
    for _ in range(count):
        recorder.between(True)
        with recorder.step(True), recorder.part("forward"):
            torch.ones(2).add(1)
    recorder.between(False)


def request(recorder: StepRecorder, steps: int = 2, limit_s: float = 10.0) -> None:
    recorder.request("router", m.Profile(KEY, ProfileOptions(steps, limit_s)))


def test_the_median_of_the_steps_before_the_recording(tmp_path: Path) -> None:
    time = Time()
    recorder, sent = recorder_in(tmp_path, time)
    request(recorder, 3)
    for pause_s in (0.01, 0.02, 1.0):
        steps(recorder, 1)
        time.now_s += pause_s
    steps(recorder, WARM_STEPS + 3)
    summary = sent.wait_for(m.Profiled).summary
    assert summary.plain_step_ms == pytest.approx(20.0)
    assert (summary.steps, summary.lane) == (3, "decode r0")
    recorder.close()


def test_a_profiler_that_does_not_start_disturbs_no_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(**options: Any) -> None:
        raise RuntimeError("CUPTI is in use\nby another program")

    recorder, sent = recorder_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler, "profile", failing)
        request(recorder)
        steps(recorder, 4)
    failed = sent.wait_for(m.ProfileFailed)
    assert failed.error == "decode r0: the profiler failed: CUPTI is in use"
    request(recorder)
    steps(recorder, 3 + WARM_STEPS + 2)
    sent.wait_for(m.Profiled)
    recorder.close()


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    recorder, sent = recorder_in(tmp_path / "file" / "traces")
    request(recorder)
    steps(recorder, 4)
    failed = sent.wait_for(m.ProfileFailed)
    assert failed.code == "config"
    assert "metrics.profile_folder" in failed.error
    recorder.close()


def test_the_limit_stops_the_profiler_with_too_few_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: list[bool] = []

    class Watched(torch.autograd.profiler.profile):
        def __enter__(self) -> Any:
            running.append(True)
            return super().__enter__()

        def __exit__(self, *error: Any) -> Any:
            running.append(False)
            return super().__exit__(*error)

    monkeypatch.setattr(torch.autograd.profiler, "profile", Watched)
    time = Time()
    recorder, sent = recorder_in(tmp_path, time)
    request(recorder, 2, 10.0)
    steps(recorder, 3 + WARM_STEPS - 1)
    assert running == [True]
    time.now_s = 11.0
    recorder.between(False)
    assert "had 5 steps within 10 s" in sent.wait_for(m.ProfileFailed).error
    assert running == [True, False]
    assert list(tmp_path.iterdir()) == []
    recorder.close()


def test_a_full_disk_leaves_no_part_of_a_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def cut_off(profiler: Any, path: str) -> None:
        Path(path).write_text('{"traceEvents": [')
        raise OSError(28, "No space left on device")

    recorder, sent = recorder_in(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd.profiler.profile, "export_chrome_trace", cut_off)
        request(recorder)
        steps(recorder, 3 + WARM_STEPS + 2)
    assert "No space left on device" in sent.wait_for(m.ProfileFailed).error
    assert list(tmp_path.iterdir()) == []
    recorder.close()


def test_a_summary_that_takes_too_long_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_recorder, "SUMMARY_S", 0.0)
    recorder, sent = recorder_in(tmp_path)
    request(recorder)
    steps(recorder, 3 + WARM_STEPS + 2)
    assert "the trace was not summarized" in sent.wait_for(m.ProfileFailed).error
    recorder.close()
    assert list(tmp_path.iterdir()) == []


def test_after_its_end_a_recorder_refuses(tmp_path: Path) -> None:
    recorder, sent = recorder_in(tmp_path)
    recorder.close()
    request(recorder)
    assert "decode r0 stops" in sent.wait_for(m.ProfileFailed).error


def test_the_profiler_starts_and_stops_outside_of_the_time_of_a_step(tmp_path: Path) -> None:
    """However long that takes, no step hangs."""
    watch, seen = StepWatch(1.0), list[bool]()

    class Looking(StepRecorder):
        def between(self, works: bool) -> None:
            seen.append(watch.running)
            super().between(works)

    recorder = Looking("decode r0", CPU, MetricsConfig(profile_folder=str(tmp_path)), Sent())
    plans = iter([StepPlan(1, [Work(KEY, 1, 0, 0, [1], 1)])])
    running: list[bool] = []
    ended = threading.Event()

    def next_plan() -> StepPlan | None:
        plan = next(plans, None)
        if plan is None:
            ended.set()
        return plan

    def step(plan: StepPlan) -> None:
        running.append(watch.running)

    thread = ComputeThread("decode r0", next_plan, step, lambda: None, lambda error: None, watch, recorder)
    thread.start()
    assert ended.wait(PATIENCE_S)
    thread.stop(lambda: None)
    assert running == [True]
    assert set(seen) == {False}
