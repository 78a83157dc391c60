"""Summaries of traces with events made by hand."""

from __future__ import annotations

import gzip
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from disagg.core.errors import DisaggError
from disagg.core.profile.intervals import Event, Interval, gaps, innermost, union
from disagg.core.profile.kinds import KINDS, kind_of
from disagg.core.profile.summary import MAX_PICTURE_INTERVALS, summarize
from disagg.core.profile.trace import read_trace
from disagg.core.profile.types import TraceSource, TraceSummary

ORIGIN_US = 5e12
"""Traces count from some time long ago."""
GEMM, ATTENTION = "nvjet_tst_128x8", "decode_kernel"


def line(
    category: str, name: str, start: float, stop: float, *, thread: int = 1, stream: int = 7
) -> dict[str, Any]:
    on_device = category in ("kernel", "gpu_memcpy", "gpu_memset", "gpu_user_annotation")
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 0 if on_device else 42,
        "tid": stream if on_device else thread,
        "ts": ORIGIN_US + start,
        "dur": stop - start,
        "args": {"stream": stream} if on_device else {},
    }


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    others = [
        {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}},
        {"ph": "i", "name": "end"},
    ]
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": [*others, *lines]}))
    return path


def source(path: Path, *, skipped: int = 0, device: str = "cuda", wanted: int = 2) -> TraceSource:
    return TraceSource(
        raw=str(path),
        trace=str(path),
        lane="decode r0",
        host="here",
        device=device,
        wanted_steps=wanted,
        skipped_steps=skipped,
        plain_step_ms=0.9,
    )


def two_steps() -> list[dict[str, Any]]:
    """A step to warm up, then two steps of 1000 us.

    Kernels of two streams overlap, a copy covers a gap between kernels, and 300 us of the second step are a pause.
    """
    return [
        line("user_annotation", "disagg step", -500, 0),
        line("kernel", GEMM, -400, -100),
        line("user_annotation", "disagg step", 0, 990),
        line("user_annotation", "disagg forward", 0, 300),
        line("cuda_runtime", "cudaGraphLaunch", 100, 250),
        line("user_annotation", "disagg commit", 300, 980),
        line("cuda_runtime", "cudaEventSynchronize", 310, 900),
        line("kernel", GEMM, -50, 400),  # clipped to 400
        line("kernel", ATTENTION, 200, 600, stream=8),  # adds 200
        line("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 600, 700, stream=9),  # adds 100
        line("gpu_memset", "Memset (Device)", 650, 700, stream=9),
        line("kernel", GEMM, 705, 1200),  # after a gap of 5
        line("gpu_user_annotation", "disagg step", 0, 2000),  # a mark, no work
        line("user_annotation", "disagg step", 1000, 2000),
        line("user_annotation", "disagg plan", 990, 1000),
        line("user_annotation", "disagg commit", 1300, 1600),
        line("cpu_op", "aten::to", 1400, 1450),
        line("kernel", GEMM, 1500, 2300),  # from 1200 to 1500 nothing runs; clipped to 500
        line("cuda_runtime", "cudaMemcpyAsync", 1200, 1500, thread=2),  # another thread
    ]


def summary_of(tmp_path: Path, lines: list[dict[str, Any]], **options: Any) -> TraceSummary:
    found = source(write(tmp_path / "trace.json", lines), **options)
    return summarize(read_trace(Path(found.trace), found.device), found)


def test_shares_count_the_time_of_overlapping_streams_once(tmp_path: Path) -> None:
    found = summary_of(tmp_path, two_steps(), skipped=1)
    assert (found.steps, found.window_ms) == (2, pytest.approx(2.0))
    assert found.busy_share == pytest.approx((700 + 495 + 500) / 2000)
    assert found.compute_share == pytest.approx((600 + 495 + 500) / 2000)
    assert found.copy_share == pytest.approx(100 / 2000)
    assert found.short_gap_share == pytest.approx(5 / 2000)
    assert (found.pause_count, found.pause_share) == (1, pytest.approx(300 / 2000))
    assert (found.step_ms_p50, found.step_ms_p99) == (pytest.approx(1.0), pytest.approx(1.0))
    kinds = {group.name: (group.ms, group.count) for group in found.groups}
    assert kinds["matrix products"] == (pytest.approx(0.4 + 0.495 + 0.5), 3)
    assert kinds["attention"] == (pytest.approx(0.4), 1)
    assert kinds["copies"] == (pytest.approx(0.15), 2)


def test_a_pause_says_what_the_step_thread_did(tmp_path: Path) -> None:
    [pause] = summary_of(tmp_path, two_steps(), skipped=1).pauses
    assert (pause.at_ms, pause.ms) == (pytest.approx(1.2), pytest.approx(0.3))
    times = {part.name: part.ms for part in pause.host}
    assert times == {
        "step: Python": pytest.approx(0.1),
        "commit: Python": pytest.approx(0.15),
        "commit: aten::to": pytest.approx(0.05),
    }
    assert sum(part.share for part in pause.host) == pytest.approx(1.0)


def test_without_skipped_steps_the_window_begins_earlier(tmp_path: Path) -> None:
    found = summary_of(tmp_path, two_steps())
    assert (found.steps, found.window_ms) == (3, pytest.approx(2.5))
    assert found.pauses[0].ms == pytest.approx(0.3)


def test_the_picture_has_lanes_of_a_few_steps(tmp_path: Path) -> None:
    lines = [
        event
        for number in range(40)
        for event in (
            line("user_annotation", "disagg step", 100 * number, 100 * number + 99),
            line("kernel", GEMM, 100 * number, 100 * number + 70),
            line("kernel", ATTENTION, 100 * number + 10, 100 * number + 20, stream=8),
        )
    ]
    picture = summary_of(tmp_path, lines).picture
    assert picture is not None
    assert (picture.at_ms, len(picture.steps_ms)) == (pytest.approx(1.6), 8)
    assert [lane.name for lane in picture.lanes] == ["stream 7", "stream 8", "step thread"]
    assert picture.lanes[0].kinds == ["matrix products"] * 8
    assert picture.lanes[1].starts_ms[1] == pytest.approx(0.11)
    assert [pause.ms for pause in picture.pauses] == pytest.approx([0.03] * 7 + [0.029])
    assert picture.lanes[2].kinds == ["step"] * 8


def test_a_lane_is_bounded(tmp_path: Path) -> None:
    names = (GEMM, ATTENTION)
    lines = [line("kernel", names[number % 2], 10 * number, 10 * number + 9) for number in range(9000)]
    lines.append(line("user_annotation", "disagg step", 0, 90000))
    picture = summary_of(tmp_path, lines).picture
    assert picture is not None
    assert len(picture.lanes[0].kinds) == MAX_PICTURE_INTERVALS


def test_on_a_cpu_the_outer_operators_of_the_step_thread_count(tmp_path: Path) -> None:
    lines = [
        line("user_annotation", "disagg step", 0, 1000),
        line("cpu_op", "aten::linear", 100, 500),
        line("cpu_op", "aten::addmm", 100, 400),
        line("cpu_op", "aten::softmax", 600, 700),
        line("cpu_op", "aten::mm", 0, 1000, thread=2),
    ]
    found = summary_of(tmp_path, lines, device="cpu")
    assert found.busy_share == pytest.approx(0.5)
    assert {group.name: group.count for group in found.groups} == {"matrix products": 1, "sampling": 1}


def test_a_trace_of_another_program_is_one_window(tmp_path: Path) -> None:
    lines = [
        line("cuda_runtime", "cudaLaunchKernel", 0, 20),
        line("kernel", GEMM, 50, 100),
    ]
    found = summary_of(tmp_path, lines)
    assert (found.steps, found.window_ms, found.busy_share) == (1, pytest.approx(0.1), pytest.approx(0.5))


def test_a_trace_without_kernels_says_why(tmp_path: Path) -> None:
    lines = [line("user_annotation", "disagg step", 0, 10)]
    with pytest.raises(DisaggError, match="no event of the device: CUPTI is not available"):
        summary_of(tmp_path, lines)
    (tmp_path / "cut.json").write_text('{"traceEvents": [')
    with pytest.raises(DisaggError, match=r"cut\.json is not a readable trace"):
        read_trace(tmp_path / "cut.json", "cuda")


def test_the_process_compresses_the_trace_and_prints_the_summary(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw.json", two_steps())
    given = msgspec.structs.replace(source(raw, skipped=1), trace=str(tmp_path / "trace.json.gz"))

    def run() -> subprocess.CompletedProcess[bytes]:
        command = [sys.executable, "-m", "disagg.core.profile"]
        return subprocess.run(command, input=msgspec.json.encode(given), capture_output=True, check=False)

    done = run()
    assert done.returncode == 0, done.stderr
    summary = msgspec.json.decode(done.stdout, type=TraceSummary)
    assert (summary.steps, summary.plain_step_ms) == (2, 0.9)
    assert not raw.exists()
    with gzip.open(given.trace) as file:
        assert len(json.load(file)["traceEvents"]) == len(two_steps()) + 2
    again = run()  # there is no raw trace any more
    assert (again.returncode, again.stdout) == (1, b"")
    assert b"raw.json" in again.stderr


INTERVALS = st.lists(
    st.tuples(st.integers(0, 50), st.integers(1, 20)).map(lambda x: Interval(x[0], x[0] + x[1]))
)


@given(INTERVALS)
def test_union_and_gaps_cover_the_window(intervals: list[Interval]) -> None:
    window = Interval(0, 70)
    busy = union(intervals)
    covered = {at for one in intervals for at in range(int(one.start), int(one.stop))}
    assert sum(one.length for one in busy) == len(covered)
    idle = gaps(busy, window)
    assert {at for one in idle for at in range(int(one.start), int(one.stop))} == set(range(70)) - covered
    assert all(before.stop < after.start for before, after in itertools.pairwise(busy))


def test_the_innermost_event_counts() -> None:
    calls = [Event(0, 10, "a"), Event(2, 8, "b"), Event(3, 4, "c"), Event(6, 8, "d"), Event(12, 13, "e")]
    found = [(one.start, one.stop, one.name.split("\n")) for one in innermost(calls)]
    assert found == [
        (0, 2, ["a"]),
        (2, 3, ["a", "b"]),
        (3, 4, ["a", "b", "c"]),
        (4, 6, ["a", "b"]),
        (6, 8, ["a", "b", "d"]),
        (8, 10, ["a"]),
        (12, 13, ["e"]),
    ]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("decode_kernel", "attention"),
        ("norm_kernel", "norms"),
        ("_matmul_tma_kernel", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("rotary_kernel", "rotary and KV"),
        ("draw_kernel", "sampling"),
        ("Memcpy DtoH (Device -> Pinned)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::AddFunctor<float>>", "elementwise"),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
        ("expert_matmul_kernel", "experts"),
        ("unheard_of", "other"),
    ],
)
def test_kinds_of_kernels(name: str, kind: str) -> None:
    assert kind_of(name) == kind
    assert kind in KINDS
