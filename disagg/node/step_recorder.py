"""Records a profile of some steps of a running rank: `disagg profile`.

control thread    `request` starts a recording
compute thread    `between` starts and stops torch's profiler between two steps; `part` marks what the thread does
another thread    waits for `python -m disagg.core.profile`, which compresses and summarizes the trace

A recording has two phases: steps that are only timed, then steps with the profiler. Steps run and end as usual.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import structlog
import torch

from disagg.core.config.read import MetricsConfig
from disagg.core.errors import BusyError, ConfigError, DisaggError, RequestTimeoutError, first_line
from disagg.core.ports import Clock
from disagg.core.profile.trace import PREFIX, STEP, WARM_STEPS
from disagg.core.profile.types import ProfileOptions, TraceSource, TraceSummary
from disagg.core.types import RequestKey
from transport.control import messages as m

log = structlog.get_logger(__name__)

PLAIN_STEPS = 100
"""Most steps that are timed before the recording, because the profiler slows steps down."""
PLAIN_SHARE = 0.25
"""Part of the time limit after which the recording begins, even if fewer steps were timed."""
PROGRESS_S = 0.5
SUMMARY_S = 120.0
"""Time limit of the process that summarizes."""
SETTING = "metrics.profile_folder"
CUPTI_STAYS = {"TEARDOWN_CUPTI": "0", "DISABLE_CUPTI_LAZY_REINIT": "1"}
"""Variables that Kineto reads. Without them, a second recording of CUDA graphs can crash the process."""
_NOTHING: AbstractContextManager[object] = nullcontext()


class _Requester(NamedTuple):
    peer: str
    key: RequestKey


class _StepRecording:
    """One recording, used on the compute thread."""

    def __init__(self, requester: _Requester, options: ProfileOptions, now_s: float) -> None:
        self.requester, self.options = requester, options
        self.began_s, self.deadline_s = now_s, now_s + options.limit_s
        self.progress_s = now_s
        self.plain_s: list[float] = []
        """Start times of the steps that are only timed."""
        self.begun = 0
        """Steps begun with the profiler."""
        self.profiler: Any = None
        self.runs = False
        """Whether the profiler has started and not stopped."""
        self.start_s = self.stop_s = 0.0

    @property
    def recorded(self) -> int:
        """Number of complete steps of the window; valid between two steps."""
        return max(0, self.begun - WARM_STEPS)

    @property
    def plain_step_ms(self) -> float:
        times = [after - before for before, after in zip(self.plain_s, self.plain_s[1:], strict=False)]
        return statistics.median(times) * 1e3 if times else 0.0

    def is_timed(self, now_s: float) -> bool:
        """Returns whether enough steps were timed without the profiler."""
        wanted = min(PLAIN_STEPS, self.options.steps)
        return len(self.plain_s) > wanted or now_s > self.began_s + PLAIN_SHARE * self.options.limit_s


class StepRecorder:
    """Records one profile at a time. Without a recording, each method of a step costs one check of an attribute."""

    def __init__(
        self,
        lane: str,
        device: torch.device,
        config: MetricsConfig,
        send: Callable[[str, m.Message], None],
        clock: Clock = time.monotonic,
    ) -> None:
        """Without `profile_folder` in `config`, every request is refused."""
        self.device = device
        """The rank's device."""
        self._lane, self._folder = lane, config.profile_folder
        self._send, self._clock = send, clock
        self._lock = threading.Lock()  # guards `_busy` and `_process`
        self._busy = self._closed = False
        self._recording: _StepRecording | None = None
        """The recording that needs steps. Set on the control thread, removed on the compute thread."""
        self._marking = False
        self._summarizer: threading.Thread | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def request(self, peer: str, message: m.Profile) -> None:
        """Begins a recording with the next step; replies to `peer`. Never blocks."""
        requester = _Requester(peer, message.key)
        with self._lock:
            busy, self._busy = self._busy, self._busy or self._folder is not None
        if self._folder is None:
            self._fail(requester, ConfigError(f"{self._lane} records no profile: set {SETTING} to a folder"))
        elif busy:
            self._fail(requester, BusyError(f"{self._lane} records another profile: wait for its end"))
        elif self._closed:
            self._end(requester, DisaggError(f"{self._lane} stops"))
        else:
            self._send(peer, m.ProfileProgress(message.key, 0))
            self._recording = _StepRecording(requester, message.options, self._clock())

    def part(self, name: str) -> AbstractContextManager[object]:
        """Marks the block in a running recording: what the compute thread does."""
        return torch.autograd.profiler.record_function(PREFIX + name) if self._marking else _NOTHING

    def step(self, works: bool) -> AbstractContextManager[object]:
        """Marks the block as a step, if it `works`."""
        return torch.autograd.profiler.record_function(STEP) if self._marking and works else _NOTHING

    def between(self, works: bool) -> None:
        """Starts, stops or ends the recording. Called between two steps; `works`: a step follows at once."""
        recording = self._recording
        if recording is None:
            return
        try:
            self._advance(recording, works, self._clock())
        except DisaggError as exc:
            self._abandon(recording, exc)
        except Exception as exc:  # noqa: BLE001 - a fault of the profiler must not end the rank
            self._abandon(recording, DisaggError(f"{self._lane}: the profiler failed: {first_line(exc)}"))

    def close(self) -> None:
        """Ends a running recording without a trace. Called on the compute thread after the last step."""
        self._closed = True
        if self._recording is not None:
            self._abandon(self._recording, DisaggError(f"{self._lane} stops"))
        with self._lock:
            process = self._process
        if process is not None:
            process.kill()
        if self._summarizer is not None:
            self._summarizer.join()

    # --- on the compute thread

    def _advance(self, recording: _StepRecording, works: bool, now_s: float) -> None:
        complete = recording.recorded >= recording.options.steps
        if complete or (now_s > recording.deadline_s and recording.recorded):
            self._finish(recording)
        elif now_s > recording.deadline_s:
            self._abandon(recording, self._late(recording))
        else:
            self._report(recording, now_s)
            if works:
                self._begin_step(recording, now_s)

    def _begin_step(self, recording: _StepRecording, now_s: float) -> None:
        if recording.profiler is None:
            recording.plain_s.append(now_s)
            if not recording.is_timed(now_s):
                return
            self._start(recording)
        recording.begun += 1

    def _late(self, recording: _StepRecording) -> DisaggError:
        limit_s = recording.options.limit_s
        steps = len(recording.plain_s) + max(0, recording.begun - 1)  # the first recorded step is in both
        return RequestTimeoutError(
            f"{self._lane} had {steps} steps within {limit_s:g} s, too few for a profile: send requests while it "
            f"records, or raise --limit-s"
        )

    def _report(self, recording: _StepRecording, now_s: float) -> None:
        if now_s >= recording.progress_s + PROGRESS_S:
            recording.progress_s = now_s
            peer, key = recording.requester
            self._send(peer, m.ProfileProgress(key, recording.recorded))

    def _start(self, recording: _StepRecording) -> None:
        self._make_folder()
        began_s = self._clock()
        device = "cuda" if self.device.type == "cuda" else None
        if device is not None:
            os.environ.update({name: os.environ.get(name, value) for name, value in CUPTI_STAYS.items()})
        recording.profiler = torch.autograd.profiler.profile(
            use_kineto=True, use_device=device, experimental_config=_trace_only()
        )
        recording.runs = True
        recording.profiler.__enter__()
        self._marking = True
        recording.start_s = self._clock() - began_s

    def _make_folder(self) -> Path:
        assert self._folder is not None, "`request` has refused the recording"
        folder = Path(self._folder).expanduser()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            why = exc.strerror or str(exc)
            raise ConfigError(f"{self._lane}: {SETTING} = {folder} cannot be made: {why}") from exc
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"{self._lane}: {SETTING} = {folder} is not writable")
        return folder

    def _stop(self, recording: _StepRecording) -> None:
        self._marking = False
        if recording.runs:
            recording.runs = False
            recording.profiler.__exit__(None, None, None)

    def _finish(self, recording: _StepRecording) -> None:
        """Stops the profiler, writes the trace, and has it summarized by another process."""
        began_s, folder = self._clock(), self._make_folder()
        name = f"{self._lane.replace(' ', '-')}-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        raw = folder / f"{name}.raw.json"
        self._stop(recording)
        try:
            recording.profiler.export_chrome_trace(str(raw))
        except Exception:
            raw.unlink(missing_ok=True)
            raise
        recording.profiler = None  # frees the events
        recording.stop_s = self._clock() - began_s
        self._recording = None
        source = TraceSource(
            raw=str(raw),
            trace=str(folder / f"{name}.trace.json.gz"),
            lane=self._lane,
            host=socket.gethostname(),
            device=self.device.type,
            wanted_steps=recording.options.steps,
            skipped_steps=WARM_STEPS,
            plain_step_ms=recording.plain_step_ms,
            start_s=recording.start_s,
            stop_s=recording.stop_s,
        )
        log.info("profiled", lane=self._lane, steps=recording.recorded, paused_s=round(recording.stop_s, 3))
        self._summarizer = threading.Thread(
            target=self._summarize,
            args=(recording.requester, source),
            name=f"profile-{self._lane}",
            daemon=True,
        )
        self._summarizer.start()

    def _abandon(self, recording: _StepRecording, error: DisaggError) -> None:
        with suppress(Exception):
            self._stop(recording)
        self._marking = False
        recording.profiler = self._recording = None
        self._end(recording.requester, error)

    # --- on the thread of the summary

    def _summarize(self, requester: _Requester, source: TraceSource) -> None:
        try:
            summary = self._summary(source)
        except (OSError, subprocess.TimeoutExpired, msgspec.DecodeError) as exc:
            self._end(
                requester, DisaggError(f"{self._lane}: the trace was not summarized: {first_line(exc)}")
            )
        except DisaggError as exc:
            self._end(requester, exc)
        else:
            self._busy = False
            self._send(requester.peer, m.Profiled(requester.key, summary))
        finally:
            for rest in (source.raw, source.partial):
                Path(rest).unlink(missing_ok=True)

    def _summary(self, source: TraceSource) -> TraceSummary:
        command = [sys.executable, "-m", "disagg.core.profile"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            with self._lock:
                self._process = process
                closed = self._closed
            try:
                if closed:
                    process.kill()
                body, errors = process.communicate(msgspec.json.encode(source), timeout=SUMMARY_S)
            except BaseException:
                process.kill()
                raise
            finally:
                with self._lock:
                    self._process = None
        if process.returncode:
            said = errors.decode(errors="replace").strip().splitlines()
            raise DisaggError(f"{self._lane}: {said[-1] if said else 'the summary was killed'}")
        return msgspec.json.decode(body, type=TraceSummary)

    # --- replies

    def _end(self, requester: _Requester, error: DisaggError) -> None:
        self._busy = False
        self._fail(requester, error)

    def _fail(self, requester: _Requester, error: DisaggError) -> None:
        log.info("no_profile", lane=self._lane, why=str(error))
        self._send(requester.peer, m.ProfileFailed(requester.key, error.code, str(error)))


def _trace_only() -> Any:
    """Returns torch's option to build no Python objects of the events, which would block the rank for seconds.

    None if this version of torch has no such option.
    """
    from torch._C import _profiler  # no public name

    with suppress(TypeError, AttributeError):
        return _profiler._ExperimentalConfig(trace_only=True)  # noqa: SLF001
    return None
