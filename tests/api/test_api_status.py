"""`/status` and the groups' part of `/metrics`, of a server whose groups are made up; and what they are made of."""

from __future__ import annotations

import random

import msgspec
import pytest
from api_server import ApiServer
from conditions import until
from prometheus_client.parser import text_string_to_metric_families

from disagg.api.quantiles import RollingQuantiles
from disagg.api.recent import KEPT, Recent
from disagg.core.errors import RequestTimeoutError
from disagg.core.status import GroupStatus, RankStatus, RouteStatus, ServiceStatus

PREFILL = GroupStatus(
    "prefill",
    "prefill",
    (
        RankStatus("prefill r0", 0, routes=(RouteStatus("decode r0", "staged", 1000, 3, 0.5),)),
        RankStatus("prefill r1", 1, routes=(RouteStatus("decode r0", "peer", 10, 1, 0.25),), faults_total=2),
    ),
    requests_waiting=4,
    pages=10,
    evicted_pages_total=7,
    preemptions_total=5,
)
DECODE = GroupStatus(
    "decode",
    "decode",
    (RankStatus("decode r0", 0, ring_bytes=100, ring_used_bytes=60, weights_bytes=7),),
    broken='a "rank"\nis gone',
)
SILENT = GroupStatus("decode-2", "decode")


def status(server: ApiServer) -> ServiceStatus:
    return msgspec.json.decode(server.client.get("/status").content, type=ServiceStatus)


def test_series_follow_the_groups() -> None:
    with ApiServer() as server:
        server.set(statuses=(PREFILL, DECODE, SILENT))
        text = server.client.get("/metrics").text
        found = {
            (sample.name, *sorted(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert found["disagg_route_bytes_total", "decode r0", "prefill r0", "staged"] == 1000
        assert found["disagg_route_busy_seconds_total", "decode r0", "peer", "prefill r1"] == 0.25
        assert found["disagg_group_requests", "prefill", "prefill", "waiting"] == 4
        assert found["disagg_kv_evicted_pages_total", "prefill", "prefill"] == 7
        assert found["disagg_preemptions_total", "prefill", "prefill"] == 5
        assert found["disagg_rank_faults_total", "1", "prefill", "prefill"] == 2
        assert found["disagg_ring_used_bytes", "0", "decode", "decode"] == 60
        assert found["disagg_weights_bytes", "0", "decode", "decode"] == 7
        assert found["disagg_group_broken", "decode", "decode"] == 1
        assert found["disagg_group_broken", "prefill", "prefill"] == 0
        assert ("disagg_ring_bytes", "0", "prefill", "prefill") not in found
        assert "decode-2" not in text, "it has reported nothing yet"
        assert [group.name for group in status(server).groups] == ["prefill", "decode", "decode-2"]
        server.set(statuses=(PREFILL,))
        text = server.client.get("/metrics").text
        assert 'group="decode"' not in text
        assert "disagg_ring_bytes" not in text


def test_status_counts_what_the_server_did() -> None:
    with ApiServer(max_running=1, max_queued=1) as server:
        assert server.ask(max_tokens=4).status_code == 200
        server.set(hold_after=2)
        with server.client.stream(
            "POST",
            "/v1/completions",
            json={"model": "tiny", "prompt": "hey", "max_tokens": 9, "stream": True},
        ) as stream:
            lines = stream.iter_lines()  # kept: without it the response is closed
            next(lines)
            until(lambda: status(server).requests_running == 1)
            assert server.ask(n=2).status_code == 429
            running = status(server).recent[0]
            assert (running.ending, running.ended_s) == ("", 0.0)
            assert running.ttft_s >= running.turn_s > 0
        until(lambda: status(server).aborts_total == 1)
        server.set(hold_after=None, fail_after=1, error=RequestTimeoutError("late"))
        assert server.ask(max_tokens=4).status_code == 504
        now = status(server)
    assert (now.refused_total, now.errors_total, now.requests_queued) == (1, 1, 0)
    assert (now.max_running, now.max_queued) == (1, 1)
    assert now.prompt_tokens_total == len("hi") + len("hey") + len("hi")
    assert now.generated_tokens_total == 4 + 2 + 1
    assert [(answer.ending, answer.error) for answer in now.recent] == [
        ("error", "timeout"),
        ("aborted", ""),
        ("length", ""),
    ]
    assert [answer.prompt_tokens for answer in now.recent] == [2, 3, 2]
    assert now.recent[0].arrived_unix_s >= now.recent[-1].arrived_unix_s > now.unix_s - 60
    assert now.ready == "ready"


def test_status_needs_a_key_and_says_why_nothing_is_taken() -> None:
    with ApiServer("secret") as server:
        assert server.client.get("/status").status_code == 401
        server.client.headers["authorization"] = "Bearer secret"
        server.set(down=["decode"])
        assert status(server).ready == "no decode group is up"


def test_only_the_last_answers_are_kept() -> None:
    recent = Recent()
    for number in range(KEPT + 5):
        recent.begin(f"r{number}", 0.0)
    assert [answer.id for answer in recent.statuses()] == [f"r{number}" for number in range(KEPT + 4, 4, -1)]


@pytest.mark.parametrize("count", [1, 2, 999])
def test_quantiles_are_close(count: int) -> None:
    choose = random.Random(count)
    values = [choose.lognormvariate(-3, 2) for _ in range(count)]
    rolling = RollingQuantiles(lambda: 7.0)
    for value in values:
        rolling.add(value)
    for share, found in zip((0.5, 0.99), rolling.quantiles((0.5, 0.99)), strict=True):
        exact = sorted(values)[max(0, -(-int(share * 1000) * count // 1000) - 1)]
        assert abs(found / exact - 1) < 0.026


def test_quantiles_are_of_the_last_minute_and_bounded() -> None:
    now_s = [0.0]
    rolling = RollingQuantiles(lambda: now_s[0])
    assert rolling.quantiles((0.5,)) == [0.0]
    for second in range(200):
        now_s[0] = float(second)
        for value in (0.0, 1e-9, 1e9, 1.0 + second):
            rolling.add(value)
    assert rolling.held_s == 60
    rolling.add(1.0)
    [least] = rolling.quantiles((0.0001,))
    assert least == pytest.approx(1e-6, rel=0.03), "what is out of range counts as the end of it"
    now_s[0] += 59
    assert rolling.quantiles((0.99,)) != [0.0]
    now_s[0] += 1
    assert rolling.quantiles((0.99,)) == [0.0]
