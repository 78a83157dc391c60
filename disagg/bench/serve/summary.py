"""The arithmetic of `disagg bench serve`: rows in, figures out. Pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from disagg.bench.handoff_figures import percentile
from disagg.bench.serve.answer import OK, REFUSED, Row

LATE_S = 0.010
"""A client that is later than this for one arrival in a hundred did not offer the load that was asked for."""
_PERCENTS = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """Of a quantity over requests, or over gaps between tokens; seconds. No value is made up between two."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True):
    """What an answer must keep to count as goodput; None: anything will do."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """For the mean over an answer's tokens after the first, as DistServe's TPOT (Zhong et al., 2024)."""

    def met_by(self, row: Row) -> bool:
        """Whether an answer that is right kept it. Without a token it counts from its end, without a second one
        there is nothing to wait for."""
        first_s = row.latency_s if row.ttft_s is None else row.ttft_s
        kept_first = self.ttft_s is None or first_s <= self.ttft_s
        return kept_first and (self.itl_s is None or row.token_s is None or row.token_s <= self.itl_s)


class Summary(msgspec.Struct, frozen=True):
    """Figures of a run. Latencies and rates are of right answers only; None where there is nothing to say."""

    requests: int
    ok: int
    refused: int
    """With status 429."""
    errors: dict[str, int]
    """All other failures and failed checks, by kind."""
    seconds: float
    """From the first request sent to the last one ended."""
    most_running: int
    ttft_s: Spread | None
    itl_s: Spread | None
    """All gaps between two events that brought tokens, of all answers."""
    token_s: Spread | None
    """Mean time of an answer's token after the first, over answers."""
    latency_s: Spread | None
    late_s: Spread | None
    """Of all arrivals of an open loop, also of those that failed."""
    request_rate: float
    """A second, as all rates."""
    input_token_rate: float
    output_token_rate: float
    goodput: float
    """Requests a second that met the SLO."""
    tokens_per_event: float | None


def summarize(rows: Sequence[Row], slo: Slo, most_running: int) -> Summary:
    """Raises `ValueError` without rows."""
    if not rows:
        raise ValueError("no requests")
    right = [row for row in rows if row.kind == OK]
    kinds = Counter(row.kind for row in rows)
    seconds = max(row.ended_s for row in rows) - min(row.sent_s for row in rows)
    events = sum(len(row.gaps_s) + 1 for row in right if row.first_s is not None)
    output_tokens = sum(row.output_tokens or 0 for row in right)

    def rate(amount: int) -> float:
        return amount / seconds if seconds > 0 else 0.0

    return Summary(
        requests=len(rows),
        ok=len(right),
        refused=kinds[REFUSED],
        errors={kind: kinds[kind] for kind in sorted(kinds) if kind not in (OK, REFUSED)},
        seconds=seconds,
        most_running=most_running,
        ttft_s=spread(row.ttft_s for row in right),
        itl_s=spread(gap for row in right for gap in row.gaps_s),
        token_s=spread(row.token_s for row in right),
        latency_s=spread(row.latency_s for row in right),
        late_s=spread(row.late_s for row in rows),
        request_rate=rate(len(right)),
        input_token_rate=rate(sum(row.input_tokens or 0 for row in right)),
        output_token_rate=rate(output_tokens),
        goodput=rate(sum(map(slo.met_by, right))),
        tokens_per_event=output_tokens / events if events else None,
    )


def spread(values: Iterable[float | None]) -> Spread | None:
    """Of the values that there are; None without any."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    p50, p90, p99 = (percentile(found, percent) for percent in _PERCENTS)
    return Spread(statistics.fmean(found), p50, p90, p99, found[-1])


def notes(summary: Summary) -> list[str]:
    """What a reader of the figures must know, each a sentence."""
    found = []
    late_s = summary.late_s
    if late_s is not None and late_s.p99 > LATE_S:
        found.append(
            f"the client was late: it sent requests up to {1e3 * late_s.max:.0f} ms after they were due "
            f"(p99 {1e3 * late_s.p99:.0f} ms); it was too busy, and measured latencies that are too high"
        )
    per_event = summary.tokens_per_event
    if per_event is not None and abs(per_event - 1) > 0.05:
        found.append(
            f"an event brought {per_event:.3g} tokens on average: inter-token latencies are between events; the time "
            "per token counts tokens"
        )
    if summary.ok < summary.requests:
        found.append("latencies and rates are of right answers only")
    return found
