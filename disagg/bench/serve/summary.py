"""Computes the figures of `disagg bench serve` from the requests' results. All functions are pure."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from disagg.bench.handoff.figures import percentile
from disagg.bench.serve.answer import OK, REFUSED, RequestResult

LATE_S = 0.010
"""Largest acceptable p99 of the client's own send delays. Above it, the client did not offer the requested load."""
_PERCENTS = (50, 90, 99)


class Spread(msgspec.Struct, frozen=True):
    """Mean and percentiles, in seconds, of a quantity over requests or over intervals between tokens. Each percentile
    is one of the values, without interpolation."""

    mean: float
    p50: float
    p90: float
    p99: float
    max: float


class Slo(msgspec.Struct, frozen=True):
    """Limits that an answer must meet to count as goodput; None: no limit."""

    ttft_s: float | None = None
    itl_s: float | None = None
    """Limit for the mean time per token after the first, like DistServe's TPOT (Zhong et al., 2024)."""

    def met_by(self, row: RequestResult) -> bool:
        """Returns whether an answer met the SLO. For an answer without tokens, the time to its end counts as TTFT.

        An answer with fewer than two tokens meets the ITL limit.
        """
        first_s = row.latency_s if row.ttft_s is None else row.ttft_s
        kept_first = self.ttft_s is None or first_s <= self.ttft_s
        return kept_first and (self.itl_s is None or row.token_s is None or row.token_s <= self.itl_s)


class Summary(msgspec.Struct, frozen=True):
    """Figures of a run. Latencies and rates count correct answers only; None without data."""

    requests: int
    ok: int
    refused: int
    """Requests refused with status 429."""
    errors: dict[str, int]
    """All other failures and failed checks, by kind."""
    seconds: float
    """Time from the first send to the end of the last request."""
    most_running: int
    ttft_s: Spread | None
    itl_s: Spread | None
    """Distribution of the intervals between two consecutive events with tokens, over all answers."""
    token_s: Spread | None
    """Distribution of the mean time per token after the first (TPOT), with one value for each answer."""
    latency_s: Spread | None
    late_s: Spread | None
    """The client's send delays for all requests of an open loop, including failed ones; None in a closed loop."""
    request_rate: float
    """Correct answers per second. All rates are per second."""
    input_token_rate: float
    output_token_rate: float
    goodput: float
    """Requests per second that met the SLO."""
    tokens_per_event: float | None


def summarize(rows: Sequence[RequestResult], slo: Slo, most_running: int) -> Summary:
    """Returns the figures of a run. Raises `ValueError` without rows."""
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
    """Returns mean and percentiles of the values that are not None; None if there are no such values."""
    found = sorted(value for value in values if value is not None)
    if not found:
        return None
    p50, p90, p99 = (percentile(found, percent) for percent in _PERCENTS)
    return Spread(statistics.fmean(found), p50, p90, p99, found[-1])


def notes(summary: Summary) -> list[str]:
    """Returns notes on the figures, each a sentence."""
    found = []
    late_s = summary.late_s
    if late_s is not None and late_s.p99 > LATE_S:
        found.append(
            f"the client was late: requests were sent up to {1e3 * late_s.max:.0f} ms after their scheduled time "
            f"(p99 {1e3 * late_s.p99:.0f} ms). The client was overloaded, so measured latencies are too high"
        )
    per_event = summary.tokens_per_event
    if per_event is not None and abs(per_event - 1) > 0.05:
        found.append(
            f"an event carried {per_event:.3g} tokens on average: inter-token latencies are intervals between "
            "events; only the time per token counts single tokens"
        )
    if summary.ok < summary.requests:
        found.append("latencies and rates count correct answers only")
    return found
