"""`/metrics` and `/status` of a server that has served, and every query of the dashboard against what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import msgspec
import pytest
from api_server import samples_of
from conditions import until
from local_groups import Checkpoints, LocalGroups, small_config
from promql_page import Page, QueryError
from system_server import SystemServer

from disagg.core.status import ServiceStatus
from transport.control.reliable import ReliableOptions

DASHBOARD = json.loads(
    (Path(__file__).parents[2] / "deploy" / "grafana" / "disagg.json").read_text(encoding="utf-8")
)
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = {f"{p['title']} {t['refId']}": (t["expr"], t["legendFormat"]) for p in PANELS for t in p["targets"]}
PROMPTS = ["a" * 30, "b" * 70, "c" * 45]


ROLES = ("prefill", "decode")


class Served:
    """A server over two prefill groups and one decode group of two ranks, and what it said after some requests."""

    def __init__(self, checkpoints: Checkpoints) -> None:
        config = small_config(1, 2, groups=(2, 1), metrics_interval_s=0.05)
        options = ReliableOptions(heartbeat_s=0.05, peer_timeout_s=0.6)
        self.groups = LocalGroups(config, checkpoints.source(), options=options)
        self.server = SystemServer(self.groups, "secret")

    def serve(self) -> None:
        """Answers, and some that run out of time."""
        self.server.client.headers["authorization"] = "Bearer secret"
        for prompt in PROMPTS:
            reply = self.server.ask(prompt=prompt, max_tokens=8, ignore_eos=True)
            assert reply.status_code == 200, reply.text
        late = self.server.client.post(
            "/v1/completions",
            json={"model": "tiny", "prompt": "d", "max_tokens": 150, "ignore_eos": True, "n": 16},
            headers={"x-request-timeout-s": "0.02"},
        )
        assert late.status_code == 504
        until(self._settled)
        self.page = Page(self.text)

    def ask(self) -> ServiceStatus:
        """What `/status` says now."""
        reply = self.server.client.get("/status")
        assert reply.headers["content-type"] == "application/json"
        return msgspec.json.decode(reply.content, type=ServiceStatus)

    def _settled(self) -> bool:
        """Takes `/status` and `/metrics`, and returns whether they are of one moment, at which all was reported."""
        self.status = self.ask()
        self.text = self.server.client.get("/metrics").text
        return self._told(self.status) and _counts(self.ask()) == _counts(self.status)

    def _told(self, status: ServiceStatus) -> bool:
        """Whether `status` has all that happened. Of requests that ran out of time some was sent, and dropped."""
        ranks = [rank for group in status.groups for rank in group.ranks]
        sent = sum(route.bytes_total for rank in ranks for route in rank.routes)
        landed = sum(rank.landed_bytes_total for rank in ranks)
        busy = status.requests_running or any(
            group.requests_running or group.requests_closing for group in status.groups
        )
        truth = {role: [rank.statistics()["transfer"] for rank in self._ranks(role)] for role in ROLES}
        return (
            not busy
            and 0 < sent == sum(one.bytes_sent for one in truth["prefill"])
            and 0 < landed == sum(one.bytes_landed for one in truth["decode"])
        )

    def _ranks(self, role: str) -> list[Any]:
        return [rank for rank in self.groups.ranks if rank.role == role]


def _counts(status: ServiceStatus) -> list[tuple[int, ...]]:
    """What the groups had counted, for each group."""
    return [
        (group.steps_total, group.tokens_total, group.pages, group.requests_running)
        for group in status.groups
    ]


@pytest.fixture(scope="module")
def served(checkpoints: Checkpoints) -> Iterator[Served]:
    found = Served(checkpoints)
    try:
        with found.server:
            found.serve()
            yield found
    finally:
        found.groups.stop()


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_fits_what_is_exported(served: Served, name: str) -> None:
    query, legend = QUERIES[name]
    found = served.page.check(query)
    missing = set(re.findall(r"{{(\w+)}}", legend)) - found.label_names()
    assert not missing, f"the legend names {missing}, which the result of {query} does not have"


@pytest.mark.parametrize(
    ("query", "what"),
    [
        ("sum(disagg_no_such_metric)", "no such metric"),
        ('max by (group) (disagg_kv_pages{color=~"$group"})', "no label color"),
        ('max by (group) (disagg_kv_pages{group="nobody"})', "selects nothing"),
        ("max by (rank) (disagg_kv_pages)", "by rank"),
        ("sum(rate(disagg_kv_pages[1m]))", "rate of a gauge"),
        ("sum(disagg_steps_total)", "of a counter"),
        ("disagg_steps_total", "is a counter"),
        ("histogram_quantile(0.5, sum(rate(disagg_queue_seconds_bucket[1m])))", "buckets with le"),
        ("histogram_quantile(0.5, sum by (le) (rate(disagg_queue_seconds_sum[1m])))", "by le"),
        ("max by (group) (disagg_kv_pages) / max by (role) (disagg_kv_pages)", "has its like"),
        ("sum(disagg_kv_pages", "unclosed|expected|invalid"),
        ("avg(disagg_kv_pages)", "not checked"),
    ],
)
def test_the_check_finds_mistakes(served: Served, query: str, what: str) -> None:
    with pytest.raises(QueryError, match=what):
        served.page.check(query)


def test_every_series_of_groups_is_on_the_dashboard(served: Served) -> None:
    """What is exported for nobody is a mistake, or a panel is missing."""
    shown = {name for query, _ in QUERIES.values() for name in re.findall(r"disagg_\w+", query)}
    exported = {name for name in served.page.names if not name.endswith(("_created", "_sum", "_count"))}
    assert exported - shown == {
        "disagg_landed_bytes_total",  # the same bytes as the routes'
        "disagg_route_segments_total",
        "disagg_transfer_bytes_total",
    }


def test_metrics_and_status_say_the_same(served: Served) -> None:
    scraped = samples_of(served.text)

    def sample(name: str, **labels: str) -> float:
        return scraped[name, frozenset(labels.items())]

    status = served.status
    assert [group.name for group in status.groups] == ["prefill", "prefill-2", "decode"]
    for group in status.groups:
        named = {"group": group.name, "role": group.role}
        assert sample("disagg_group_tokens_total", **named) == group.tokens_total
        assert sample("disagg_kv_pages", **named) == group.pages > 0
        assert sample("disagg_group_requests", **named, state="running") == 0
        for rank in group.ranks:
            for route in rank.routes:
                way = {"source": rank.name, "target": route.target, "path": route.path}
                assert sample("disagg_route_bytes_total", **way) == route.bytes_total
                assert sample("disagg_route_busy_seconds_total", **way) == route.busy_s_total
    ringed = {dict(labels)["role"] for labels in served.page.check("disagg_ring_bytes").series}
    assert ringed == {"decode"}, "what a role does not have is not shown as 0"
    assert status.prompt_tokens_total == sample("disagg_prompt_tokens_total")
    assert status.generated_tokens_total == sample("disagg_generated_tokens_total")
    assert status.errors_total == sum(
        sample("disagg_errors_total", kind=dict(labels)["kind"])
        for labels in served.page.check("rate(disagg_errors_total[1m])").series
    )
    assert status.errors_total > 0


def test_the_last_answers(served: Served) -> None:
    recent = served.status.recent
    first = recent[-len(PROMPTS) :][::-1]
    assert [answer.prompt_tokens for answer in first] == [len(prompt) for prompt in PROMPTS]
    for answer in first:
        assert (answer.tokens, answer.ending, answer.error) == (8, "length", "")
        assert 0 < answer.turn_s <= answer.reserved_s <= answer.ttft_s <= answer.ended_s < 30
        assert answer.transfer_bytes == answer.prompt_tokens * served.groups.prefill_info.layout.token_bytes
        assert 0 < answer.transfer_s < answer.ended_s
        assert answer.prefill in ("prefill", "prefill-2")
        assert answer.decode == "decode"
    late = [answer for answer in recent if answer.ending == "error"]
    assert {answer.error for answer in late} == {"timeout"}
    assert 0 < served.status.ttft_p50_s <= served.status.ttft_p99_s < 30
    assert 0 < served.status.itl_p50_s <= served.status.itl_p99_s < 30
    assert (served.status.ready, served.status.requests_running) == ("ready", 0)


def test_status_needs_a_key(served: Served) -> None:
    assert served.server.client.get("/status", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_the_dashboard_is_of_no_installation() -> None:
    assert DASHBOARD["id"] is None
    assert "__inputs" not in DASHBOARD
    assert [v["name"] for v in DASHBOARD["templating"]["list"] if v["type"] == "datasource"] == ["datasource"]
    sources = [panel["datasource"] for panel in PANELS] + [
        t["datasource"] for p in PANELS for t in p["targets"]
    ]
    assert {source["uid"] for source in sources} == {"${datasource}"}


def test_panels_have_places_of_their_own() -> None:
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    places: list[dict[str, Any]] = [panel["gridPos"] for panel in DASHBOARD["panels"]]
    for one, other in combinations(places, 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
    assert all(place["x"] + place["w"] <= 24 for place in places)
    assert all(panel["description"] and panel["fieldConfig"]["defaults"]["unit"] for panel in PANELS)


def test_a_group_that_dies_is_not_shown_any_more(served: Served) -> None:
    """Last in this module: the group is gone afterwards."""
    assert 'group="prefill-2"' in served.text
    assert 'source="prefill-2 r0"' in served.text
    served.groups.kill("prefill-2-0")
    until(lambda: "prefill-2" not in served.server.client.get("/metrics").text)
    assert [group.name for group in served.ask().groups] == ["prefill", "decode"]
    assert served.server.ask(prompt="x", max_tokens=4).status_code == 200
