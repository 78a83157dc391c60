"""Results of `disagg bench tiers` from its measurements. All functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from disagg.bench.common.ceilings import size_text
from disagg.bench.common.report import Measurement, Result
from disagg.bench.handoff.figures import percentile
from disagg.bench.tiers.others import HitPlace
from disagg.bench.tiers.run import TiersMeasurements
from disagg.node.page_exchange import REPLY_BYTES

PLACE_NAMES = {
    "device": "TTFT, hit in the KV pool",
    "host": "TTFT, hit in host memory",
    "peer": "TTFT, hit in another group's host memory",
    "storage": "TTFT, hit in the storage",
    "nowhere": "TTFT, no hit",
}
PLAIN_NAMES = {"host": "plain copy", "peer": "plain transfer", "storage": "plain read"}
OTHERS_NAMES: dict[HitPlace, str] = {"device": "hits in the KV pool", "host": "hits in host memory"}


def results_of(found: TiersMeasurements) -> list[Result]:
    """Returns the results: TTFT by place, costs of loads, plain copies, the workload by its tiers, then answers
    beside hits."""
    return [
        *_ttft(found),
        *_hidden(found),
        *_load_costs(found),
        *_plain(found),
        *_turns(found),
        *_others(found),
    ]


def _ttft(found: TiersMeasurements) -> list[Result]:
    ceilings = {
        place: _after(
            found, statistics.median(found.ttft_s["device"]), found.plain[place], f"pool hit + {name}"
        )
        for place, name in PLAIN_NAMES.items()
        if place in found.plain and "device" in found.ttft_s
    }
    return [
        Result(
            title,
            Measurement("TTFT", "ms", _ms(found.ttft_s[place])),
            ceilings.get(place),
            found.labels,
            "from the call of the router to the first token; alone on the engine",
        )
        for place, title in PLACE_NAMES.items()
        if place in found.ttft_s
    ]


def _hidden(found: TiersMeasurements) -> list[Result]:
    """Returns the part of a load from host memory that adds nothing to TTFT."""
    if "host" not in found.ttft_s:
        return []
    more_s = statistics.median(found.ttft_s["host"]) - statistics.median(found.ttft_s["device"])
    copy_s = found.nbytes / found.plain["host"].median / 1e9
    return [
        Result(
            "load hidden under compute",
            Measurement("hidden", "%", (100 * (1 - more_s / copy_s),)),
            None,
            found.labels,
            "1 - (TTFT of a hit in host memory - TTFT of a hit in the pool) / time of the plain copy; medians",
        )
    ]


def _after(found: TiersMeasurements, pool_s: float, rate: Measurement, name: str) -> Measurement:
    """Returns the TTFT in ms of a load at the rate of a plain copy, without overlap with computation."""
    return Measurement(name, "ms", tuple(1e3 * (pool_s + found.nbytes / one / 1e9) for one in rate.values))


def _load_costs(found: TiersMeasurements) -> list[Result]:
    """Returns `router.host_load_cost` and `router.storage_load_cost` of this machine; none if a hit saves no time."""
    if "host" not in found.ttft_s:
        return []
    median = {place: statistics.median(seconds) for place, seconds in found.ttft_s.items()}
    computing_s = median["nowhere"] - median["device"]
    if computing_s <= 0:
        return []
    return [
        Result(
            f"router.{place}_load_cost",
            Measurement("cost", "of computing", (max(0.0, median[place] - median["device"]) / computing_s,)),
            None,
            found.labels,
            "additional TTFT of a load, over the additional TTFT of computing the same tokens; medians",
        )
        for place in ("host", "storage")
        if place in median
    ]


def _plain(found: TiersMeasurements) -> list[Result]:
    size, message = size_text(found.nbytes), size_text(REPLY_BYTES)
    titles = {
        "host": f"plain copy from host memory, {size}",
        "peer": f"plain transfer, messages of {message}",
        "storage": f"plain read of a file, {size}",
    }
    return [
        Result(title, found.plain[place], None, found.labels)
        for place, title in titles.items()
        if place in found.plain
    ]


def _turns(found: TiersMeasurements) -> list[Result]:
    results: list[Result] = []
    for name, run in found.runs.items():
        labels = {**found.labels, "tiers": name, "conversations": len(run.transcripts)}
        figures: list[tuple[str, str, float, str]] = [
            ("requests", "requests/s", len(run.ttft_s) / run.seconds, ""),
            ("TTFT p50", "ms", 1e3 * percentile(run.ttft_s, 50), ""),
            ("TTFT p99", "ms", 1e3 * percentile(run.ttft_s, 99), ""),
            ("hits in the KV pool", "%", run.hit_percent(run.counts.device), "of all prompt tokens"),
            ("hits in host memory", "%", run.hit_percent(run.counts.host), "of all prompt tokens"),
            ("hits in the storage", "%", run.hit_percent(run.counts.storage), "of all prompt tokens"),
        ]
        results += [
            Result(f"{title}, {name}", Measurement(title, unit, (value,)), None, labels, definition)
            for title, unit, value, definition in figures
        ]
    return results


def _others(found: TiersMeasurements) -> list[Result]:
    """Returns percentiles of the time between tokens of running answers; the values are those of the rounds.

    With hits in host memory, the ceiling is the same workload with hits in the pool.
    """
    results: list[Result] = []
    for percent in (50, 99) if found.others else ():
        base: Measurement | None = None
        for place, name in OTHERS_NAMES.items():
            rounds = found.others[place]
            labels = {**found.labels, "hits": sum(one.hits for one in rounds)}
            values = tuple(one.percentile_ms(percent) for one in rounds)
            title = f"time between tokens of other answers p{percent}, {name}"
            results.append(Result(title, Measurement(name, "ms", values), base, labels))
            base = Measurement(name, "ms", values)
    return results


def _ms(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(1e3 * one for one in seconds)
