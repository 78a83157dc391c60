"""Prometheus metrics of one server, in its own registry, so servers in one process (tests) share no counts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from disagg.api.live_metrics import LiveCounter, LiveHistogram
from disagg.router.answers import SessionReport
from disagg.router.session_events import Loss

FINE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
COARSE_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
WIRE_S = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)


class RouterCounter(Collector):
    """A counter with one label, read from a router's live counts at each scrape."""

    def __init__(
        self, name: str, text: str, label: str, counts: Mapping[str, int], values: Iterable[str] = ()
    ) -> None:
        """`counts`: counts by value of the label. `values`: values that have a sample even with a count of 0."""
        self._name, self._text, self._label, self._counts = name, text, label, counts
        self._zeros = dict.fromkeys(values, 0)

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yields the family, with a sample for each value of the label."""
        family = CounterMetricFamily(self._name, self._text, labels=[self._label])
        for value, count in {**self._zeros, **self._counts}.items():
            family.add_metric([value], count)
        yield family


def router_counters(
    recoveries: Mapping[str, int],
    suspicions: Mapping[str, int],
    local_prefills: Mapping[str, int],
    moved_prompts: Mapping[str, int],
) -> tuple[RouterCounter, ...]:
    """Returns the collectors of a router's live counts."""
    return (
        RouterCounter(
            "disagg_recoveries",
            "Losses after which a request continued in another session, by cause",
            "cause",
            recoveries,
            [loss.value for loss in Loss],
        ),
        RouterCounter(
            "disagg_suspicions",
            "Number of times that a group was suspected (silent but not lost), by group",
            "group",
            suspicions,
        ),
        RouterCounter(
            "disagg_local_prefills",
            "Prompts that a decode group got to compute itself, by reason; with `split` only their end",
            "reason",
            local_prefills,
            ("queue", "no_prefill_group", "cached", "split"),
        ),
        RouterCounter(
            "disagg_moved_prompts",
            "Prompts that left a decode group's queue for a prefill group, by reason",
            "reason",
            moved_prompts,
            ("sooner",),
        ),
    )


class Metrics:
    """Prometheus metrics of one server. In the help texts, an *answer* is one choice of a reply."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.ttft = Histogram(
            "disagg_time_to_first_token_seconds",
            "Time from a request's arrival to the first token of each answer",
            registry=registry,
            buckets=COARSE_S,
        )
        self.itl = LiveHistogram(
            "disagg_inter_token_latency_seconds",
            "Time between two tokens of an answer",
            registry=registry,
            buckets=FINE_S,
        )
        self.queue = Histogram(
            "disagg_queue_seconds",
            "Time from a request's arrival until an answer has a running slot and memory",
            registry=registry,
            buckets=COARSE_S,
        )
        self.running = Gauge(
            "disagg_requests_running", "Answers that the engine is computing", registry=registry
        )
        self.queued = Gauge("disagg_requests_queued", "Answers in the admission queue", registry=registry)
        self.prompt_tokens = Counter(
            "disagg_prompt_tokens", "Tokens of the prompts that were sent to the engine", registry=registry
        )
        self.generated_tokens = LiveCounter("disagg_generated_tokens", "Tokens of answers", registry)
        self.requests = Counter(
            "disagg_requests", "HTTP requests for answers, by outcome", ["outcome"], registry=registry
        )
        self.errors = Counter(
            "disagg_errors", "Answers that ended with an error, by its code", ["kind"], registry=registry
        )
        self.aborts = Counter(
            "disagg_aborts",
            "Aborted answers: the client disconnected, another answer of the request failed, or the server stopped",
            registry=registry,
        )
        self.connections = Gauge(
            "disagg_http_connections", "HTTP connections that are open", registry=registry
        )
        self.connections_closed = Counter(
            "disagg_http_connections_closed",
            "HTTP connections closed early: idle ones to make room, refused ones, slow readers",
            ["reason"],
            registry=registry,
        )
        self.transfer_bytes = Counter(
            "disagg_transfer_bytes", "KV cache sent from prefill to decode", registry=registry
        )
        self.transfer_seconds = Histogram(
            "disagg_transfer_seconds",
            "Duration of the KV transfer of one answer",
            registry=registry,
            buckets=WIRE_S,
        )

    def transferred(self, report: SessionReport) -> None:
        """Counts the KV transfer in `report`, if there was one."""
        if report.segments:
            self.transfer_bytes.inc(report.nbytes)
            self.transfer_seconds.observe(report.transfer_s)

    @staticmethod
    def total(metric: Counter | Gauge | LiveCounter, **labels: str) -> float:
        """Returns the sum of a metric's samples with these labels."""
        samples = (sample for family in metric.collect() for sample in family.samples)
        wanted = (
            s for s in samples if not s.name.endswith("_created") and labels.items() <= s.labels.items()
        )
        return sum(sample.value for sample in wanted)


class _Families(CollectorRegistry):
    """A registry of given metric families."""

    def __init__(self, families: Iterable[Metric]) -> None:
        super().__init__()
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families


def exposition(families: Iterable[Metric]) -> bytes:
    """Returns the families in Prometheus' text format."""
    return generate_latest(_Families(families))
