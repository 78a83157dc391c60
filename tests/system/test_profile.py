"""Profiles of running ranks: steps and answers go on as usual, and the trace says what the rank did."""

from __future__ import annotations

import asyncio
import gzip
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from local_groups import (
    Answered,
    Checkpoints,
    ask,
    colocated_config,
    local_groups,
    random_prompts,
    small_config,
)

from disagg.core.config.read import Config
from disagg.core.errors import BusyError, ConfigError, InvalidRequestError, RequestTimeoutError
from disagg.core.profile.types import ProfileOptions, ProfileRequest, TraceSummary
from disagg.core.types import SamplingParams
from disagg.node import step_recorder
from disagg.router.router import Router

LONG = SamplingParams(max_tokens=60)


def recording(config: Config, folder: Path | None) -> Config:
    """The configuration with a folder for traces."""
    metrics = msgspec.structs.replace(config.metrics, profile_folder=str(folder) if folder else None)
    return msgspec.structs.replace(config, metrics=metrics)


async def recorded(router: Router, request: ProfileRequest) -> TraceSummary:
    """The summary; it comes last."""
    replies = [reply async for reply in router.profile(request)]
    *numbers, summary = replies
    assert numbers == sorted(numbers)  # type: ignore[type-var]
    assert isinstance(summary, TraceSummary)
    return summary


async def profiled(
    router: Router, request: ProfileRequest, prompts: Any
) -> tuple[TraceSummary, list[Answered]]:
    """Records while the prompts are answered."""
    replies = router.profile(request)
    assert await anext(replies) == 0, "the rank has begun"
    answers = asyncio.gather(*(ask(router, f"r{i}", prompt, LONG) for i, prompt in enumerate(prompts)))
    async for reply in replies:
        last = reply
    assert isinstance(last, TraceSummary)
    return last, await answers


@pytest.mark.parametrize(("role", "rank"), [("decode", 1), ("prefill", 0), ("colocated", 0)])
def test_a_rank_records_while_streams_run(
    checkpoints: Checkpoints, tmp_path: Path, role: str, rank: int
) -> None:
    config = colocated_config() if role == "colocated" else small_config(decode_tp=2)
    prompts = random_prompts(30, 50, 20, 70)
    steps = 2 if role == "prefill" else 10
    request = ProfileRequest(ProfileOptions(steps, 30.0), role=role, rank=rank)  # type: ignore[arg-type]
    with local_groups(recording(config, tmp_path / "traces"), checkpoints.source()) as groups:
        summary, answers = groups.serve(lambda router: profiled(router, request, prompts))
        source = groups.source
    assert [answer.tokens for answer in answers] == [checkpoints.greedy(source, p, 60) for p in prompts]
    assert (summary.lane, summary.device, summary.steps) == (f"{role} r{rank}", "cpu", steps)
    assert 0.0 < summary.busy_share <= 1.0
    assert summary.busy_share + summary.pause_share + summary.short_gap_share == pytest.approx(1.0)
    assert 0 < summary.step_ms_p50 <= summary.step_ms_p99 <= summary.window_ms
    assert summary.plain_step_ms > 0
    assert {"matrix products", "attention"} & {group.name for group in summary.groups}
    with gzip.open(summary.trace) as file:
        events = json.load(file)["traceEvents"]
    names = [event["name"] for event in events]
    assert names.count("disagg step") == steps + 3
    assert "disagg forward" in names
    assert [path.suffix for path in (tmp_path / "traces").iterdir()] == [".gz"], "the raw trace is gone"


def test_what_a_rank_refuses(checkpoints: Checkpoints, tmp_path: Path) -> None:
    """Another profile meanwhile, a profile without steps, unknown ranks; afterwards a rank records again."""
    options = ProfileOptions(4, 30.0)

    async def work(router: Router) -> TraceSummary:
        with pytest.raises(InvalidRequestError, match="'decode-7' is up; the groups are: decode, prefill"):
            await recorded(router, ProfileRequest(options, group="decode-7"))
        with pytest.raises(InvalidRequestError, match="decode has no rank 3, only 0 to 0"):
            await recorded(router, ProfileRequest(options, rank=3))
        first = router.profile(ProfileRequest(ProfileOptions(4, 0.3)))
        assert await anext(first) == 0
        with pytest.raises(BusyError, match="records another profile"):
            await recorded(router, ProfileRequest(options))
        with pytest.raises(RequestTimeoutError, match=r"had 0 steps within 0\.3 s"):
            await anext(first)
        summary, _ = await profiled(router, ProfileRequest(options), random_prompts(20))
        return summary

    with local_groups(recording(small_config(), tmp_path), checkpoints.source()) as groups:
        assert groups.serve(work).steps == 4


def test_without_a_folder_nothing_is_recorded(checkpoints: Checkpoints) -> None:
    with (
        local_groups(recording(small_config(), None), checkpoints.source()) as groups,
        pytest.raises(ConfigError, match=r"set metrics\.profile_folder"),
    ):
        groups.serve(lambda router: recorded(router, ProfileRequest(ProfileOptions())))


def test_the_time_limit_ends_a_recording_with_the_steps_that_came(
    checkpoints: Checkpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # However fast the steps are, some come after those that are only timed.
    monkeypatch.setattr(step_recorder, "PLAIN_STEPS", 5)
    request = ProfileRequest(ProfileOptions(1000, 1.0))
    with local_groups(recording(small_config(), tmp_path), checkpoints.source()) as groups:
        summary, _ = groups.serve(lambda router: profiled(router, request, random_prompts(20, 20)))
    assert (summary.wanted_steps, 0 < summary.steps < 100) == (1000, True)


def test_a_rank_that_stops_ends_its_recording(checkpoints: Checkpoints, tmp_path: Path) -> None:
    async def work(router: Router) -> None:
        assert await anext(router.profile(ProfileRequest(ProfileOptions()))) == 0

    with local_groups(recording(small_config(), tmp_path), checkpoints.source()) as groups:
        groups.serve(work)
    assert list(tmp_path.iterdir()) == []
