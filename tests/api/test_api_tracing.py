"""Spans of requests: what they say, whose children they are, and how they reach a collector."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import pairwise

import pytest
from api_server import ApiServer
from conditions import until
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from disagg.api.recent import Track
from disagg.api.tracing import SpanPhase, Tracing, phases, traced
from disagg.core.config.read import MetricsConfig, load_config
from disagg.core.errors import ConfigError, TransportError

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARTS = {"queue", "reserve", "prefill", "decode"}


class Traced:
    """A server whose spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracing = Tracing(provider)
        self.server = ApiServer(tracing=self.tracing)

    def spans(self, count: int) -> tuple[ReadableSpan, ...]:
        """All of them, when there are so many."""
        until(lambda: len(self._exporter.get_finished_spans()) >= count)
        found = self._exporter.get_finished_spans()
        assert len(found) == count, [span.name for span in found]
        return found


@pytest.fixture
def kept() -> Iterator[Traced]:
    found = Traced()
    with found.server:
        yield found
    found.tracing.close()


def test_a_request_and_its_answers(kept: Traced) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    content = {"model": "tiny", "prompt": "hi", "max_tokens": 4, "n": 2}
    assert kept.server.client.post("/v1/completions", json=content, headers=headers).status_code == 200
    spans = kept.spans(1 + 2 * 4)
    [request] = [span for span in spans if span.name == "POST /v1/completions"]
    assert request.kind is SpanKind.SERVER
    assert request.parent is not None
    assert (request.parent.trace_id, request.parent.span_id) == (int(TRACE, 16), int(PARENT, 16))
    attributes = dict(request.attributes or {})
    assert attributes["disagg.request_id"] == "mine"
    assert attributes["http.response.status_code"] == 200
    parts = [span for span in spans if span is not request]
    assert {span.parent.span_id for span in parts if span.parent} == {request.context.span_id}
    answers = {str((span.attributes or {})["disagg.answer"]) for span in parts}
    assert len(answers) == 2
    for answer in answers:
        mine = [span for span in parts if (span.attributes or {})["disagg.answer"] == answer]
        assert {span.name for span in mine} == PARTS
        ordered = sorted(mine, key=lambda span: (span.start_time or 0, span.end_time or 0))
        assert all(one.end_time == other.start_time for one, other in pairwise(ordered))
    assert all(span.status.status_code is StatusCode.UNSET for span in spans)


def test_what_failed_says_where(kept: Traced) -> None:
    kept.server.set(fail_after=2, error=TransportError("cut"))
    assert kept.server.ask(max_tokens=4).status_code == 503
    spans = {span.name: span for span in kept.spans(5)}
    assert spans["decode"].status.status_code is StatusCode.ERROR
    assert spans["decode"].status.description == "transport"
    assert spans["prefill"].status.status_code is StatusCode.UNSET
    assert spans["POST /v1/completions"].status.status_code is StatusCode.ERROR
    assert spans["POST /v1/completions"].parent is None


def test_a_refused_request_has_a_span_and_a_bad_parent_is_none(kept: Traced) -> None:
    reply = kept.server.client.post("/v1/completions", json={"model": "x"}, headers={"traceparent": "00-x"})
    assert reply.status_code == 400
    kept.server.client.get("/metrics")
    [span] = kept.spans(1)
    assert span.parent is None
    assert (span.attributes or {})["disagg.outcome"] == "refused"
    assert span.status.status_code is StatusCode.UNSET, "the client's mistake"


def test_the_parts_of_an_answer() -> None:
    track = Track("a", 10.0)
    track.turn_s, track.first_s, track.ended_s = 11.0, 14.0, 20.0
    track.report.reserved_s, track.report.transfer_s, track.report.transferred_s = 1.5, 0.5, 3.0
    assert list(phases(track)) == [
        SpanPhase("queue", 10.0, 11.0),
        SpanPhase("reserve", 11.0, 12.5),
        SpanPhase("prefill", 12.5, 14.0),
        SpanPhase("decode", 14.0, 20.0),
        SpanPhase("transfer", 13.5, 14.0),
    ]
    track.first_s = track.report.transferred_s = 0.0
    assert list(phases(track))[2:] == [SpanPhase("prefill", 12.5, 20.0)]
    track.turn_s = track.report.reserved_s = 0.0
    assert list(phases(track)) == [SpanPhase("queue", 10.0, 20.0)]


def test_spans_reach_a_collector() -> None:
    bodies: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Collector) as collector:
        thread = threading.Thread(target=collector.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{collector.server_port}"
            with traced(MetricsConfig(otlp_endpoint=url)) as tracing:
                assert tracing is not None
                tracing.begin({}, "/v1/completions", "mine").end(200, "ok")
        finally:
            collector.shutdown()
            thread.join()
    [(path, body)] = bodies
    assert path == "/v1/traces"
    [resource] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert {a.key: a.value.string_value for a in resource.resource.attributes}["service.name"] == "disagg"
    assert [span.name for scope in resource.scope_spans for span in scope.spans] == ["POST /v1/completions"]


def test_what_is_not_installed_is_said_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with (
        pytest.raises(ConfigError, match=r"pip install 'disagg\[otel\]'"),
        traced(MetricsConfig(otlp_endpoint="http://x")),
    ):
        pass
    with traced(MetricsConfig()) as tracing:
        assert tracing is None


def test_an_endpoint_that_is_none() -> None:
    with pytest.raises(ConfigError, match="begins with http"):
        load_config(overrides={"metrics.otlp_endpoint": "collector:4317"})
