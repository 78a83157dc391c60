"""Spans of requests for OpenTelemetry, sent to the collector `metrics.otlp_endpoint` (extra `otel`).

request                              the HTTP request; its parent is the client's span (W3C `traceparent`)
  queue | reserve | prefill | decode   consecutive phases of each answer, up to the phase in which the answer ended
  transfer                             the transfer of the answer's KV, concurrent with the phases

The spans of an answer are created at its end from recorded times, so tracing does not slow a running request.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from disagg import __version__
from disagg.api.recent import Track
from disagg.core.config.read import MetricsConfig
from disagg.core.errors import ConfigError

TRACES = "/v1/traces"
"""Path of a collector's endpoint for spans, defined by OTLP."""


class SpanPhase(NamedTuple):
    """A phase of an answer; times on `time.monotonic`'s clock."""

    name: str
    begin_s: float
    end_s: float


def phases(track: Track) -> Iterator[SpanPhase]:
    """Yields the phases of an answer in order, then the KV transfer if the prefill group reported one."""
    report, begin_s = track.report, track.arrived_s
    moments = {
        "queue": track.turn_s,
        "reserve": track.turn_s + report.reserved_s if report.reserved_s else 0.0,
        "prefill": track.first_s,
        "decode": track.ended_s,
    }
    for name, moment_s in moments.items():
        end_s = max(begin_s, moment_s or track.ended_s)
        yield SpanPhase(name, begin_s, end_s)
        if not moment_s:
            break
        begin_s = end_s
    if report.transferred_s:
        end_s = track.turn_s + report.transferred_s
        yield SpanPhase("transfer", end_s - report.transfer_s, end_s)


class RequestTrace:
    """The span of one HTTP request, and the spans of its answers. Created by `Tracing.begin`."""

    def __init__(self, tracer: Any, span: Any) -> None:
        self._tracer, self._span = tracer, span

    def answer(self, track: Track) -> None:
        """Creates the spans of an ended answer. An answer may end after its request."""
        from opentelemetry import trace

        parent = trace.set_span_in_context(self._span)
        named = {
            "disagg.answer": track.id,
            "disagg.prefill_group": track.report.prefill,
            "disagg.decode_group": track.report.decode,
        }
        found = list(phases(track))
        failed_in = [phase for phase in found if phase.name != "transfer"][-1].name if track.error else ""
        for phase in found:
            more = {"disagg.transfer_bytes": track.report.nbytes} if phase.name == "transfer" else {}
            span = self._tracer.start_span(
                phase.name, parent, attributes=named | more, start_time=_unix_ns(track, phase.begin_s)
            )
            if phase.name == failed_in:
                span.set_status(trace.StatusCode.ERROR, track.error)
            span.end(_unix_ns(track, phase.end_s))

    def end(self, status: int, outcome: str) -> None:
        """Ends the request's span. `status` is the HTTP status, or for a broken stream the status of its error."""
        from opentelemetry.trace import StatusCode

        self._span.set_attributes({"http.response.status_code": status, "disagg.outcome": outcome})
        if status >= 500:
            self._span.set_status(StatusCode.ERROR, outcome)
        self._span.end()


class Tracing:
    """Owns the tracer provider; `close` sends the remaining spans."""

    def __init__(self, provider: Any) -> None:
        """`provider`: the SDK's `TracerProvider`, with a span processor."""
        self._provider, self._tracer = provider, provider.get_tracer("disagg", __version__)

    def begin(self, headers: Mapping[bytes, bytes], path: str, request_id: str) -> RequestTrace:
        """Starts the span of a request to `path`. An invalid `traceparent` is ignored."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        given = {
            name: value.decode("latin-1")
            for name in ("traceparent", "tracestate")
            if (value := headers.get(name.encode())) is not None
        }
        attributes = {"http.request.method": "POST", "url.path": path, "disagg.request_id": request_id}
        span = self._tracer.start_span(
            f"POST {path}",
            TraceContextTextMapPropagator().extract(given),
            kind=SpanKind.SERVER,
            attributes=attributes,
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Blocks until the remaining spans are sent or have failed."""
        self._provider.shutdown()


@contextmanager
def traced(config: MetricsConfig) -> Iterator[Tracing | None]:
    """Within the block, exports spans to `metrics.otlp_endpoint`; yields None without an endpoint.

    Raises `ConfigError` when OpenTelemetry is not installed.
    """
    tracing = None if config.otlp_endpoint is None else _to_collector(config.otlp_endpoint)
    try:
        yield tracing
    finally:
        if tracing is not None:
            tracing.close()


def _to_collector(endpoint: str) -> Tracing:
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as exc:
        raise ConfigError(
            f"metrics.otlp_endpoint = {endpoint} needs OpenTelemetry, which is not installed ({exc.name}): "
            f"pip install 'disagg[otel]', or leave the setting out"
        ) from exc
    resource = Resource.create({"service.name": "disagg", "service.version": __version__})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    url = endpoint.rstrip("/").removesuffix(TRACES) + TRACES
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(url)))
    return Tracing(provider)


def _unix_ns(track: Track, moment_s: float) -> int:
    return int((track.arrived_unix_s + moment_s - track.arrived_s) * 1e9)
