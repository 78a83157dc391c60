"""The summary of a profile, made by hand."""

from __future__ import annotations

from disagg.core.profile.types import Pause, ProfileLane, ProfilePart, ProfilePicture, TraceSummary

PAUSE = Pause(
    1.5, 0.4, [ProfilePart("commit: cudaEventSynchronize", 0.3, 0.75), ProfilePart("plan: Python", 0.1, 0.25)]
)
SUMMARY = TraceSummary(
    lane="decode r0",
    host="far-away",
    trace="/traces/decode-r0-20260101-000000.trace.json.gz",
    device="cuda",
    steps=90,
    wanted_steps=100,
    window_ms=900.0,
    plain_step_ms=9.5,
    step_ms_p50=10.0,
    step_ms_p99=12.5,
    busy_share=0.9525,
    compute_share=0.95,
    copy_share=0.0125,
    short_gap_share=0.02,
    pause_share=0.0275,
    pause_count=40,
    least_pause_ms=0.01,
    pauses=[PAUSE],
    host_in_pauses=[ProfilePart("commit: cudaEventSynchronize", 20.0, 0.8)],
    groups=[ProfilePart("matrix products", 600.0, 0.667, 9000), ProfilePart("attention", 250.0, 0.278, 2900)],
    start_s=0.25,
    stop_s=0.5,
    picture=ProfilePicture(
        400.0,
        4.0,
        [0.0, 2.0],
        [
            ProfileLane(
                "stream 7", ["matrix products", "attention", "unheard of"], [0.0, 2.0, 3.1], [1.5, 3.0, 4.0]
            ),
            *(ProfileLane(f"stream {number}", ["copies"], [0.5], [0.6]) for number in range(8, 20)),
            ProfileLane("step thread", ["forward", "commit"], [0.0, 1.0], [1.0, 4.0]),
        ],
        [PAUSE],
    ),
)
