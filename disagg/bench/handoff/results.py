"""The results of `disagg bench handoff`: each figure with its definition. All functions are pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from disagg.bench.common.report import Label, Measurement, Result
from disagg.bench.handoff.figures import percentile
from disagg.bench.handoff.measure import HandoffMeasurements, HandOver
from disagg.model.rounding import worst_of

_PERCENTS = (50, 99)
_BESIDE = {
    "quiet": "no other activity",
    "prefill": "the prefill group computing a prompt whose KV is not sent",
    "arriving": "another request's KV arriving in this group (start of the first receive or write to last landing)",
}


def results_of(found: HandoffMeasurements, labels: dict[str, Label], ceiling: Measurement) -> list[Result]:
    """Returns a result for each figure, with one value for each repeat."""
    lines = [
        *_transfer(found, ceiling),
        *_landed(found, labels),
        *_prefill(found),
        *_decode(found),
        *_first_tokens(found),
        *_compared(found),
    ]
    counted: dict[str, Label] = {
        f"steps_{kind}": sum(len(getattr(steps, kind)) for steps in found.rounds) for kind in _BESIDE
    }
    return [
        Result(title, figure, limit, labels | counted, definition)
        for title, figure, limit, definition in lines
    ]


Line = tuple[str, Measurement, Measurement | None, str]


def _transfer(found: HandoffMeasurements, ceiling: Measurement) -> Iterator[Line]:
    def line(title: str, unit: str, value: Callable[[HandOver], float], definition: str) -> Line:
        return title, _figure("transfer", unit, map(value, found.handovers)), None, definition

    yield line(
        "transfer, exposed share",
        "%",
        lambda one: 100 * one.exposed_s / one.moved.whole.seconds,
        "exposed time over the whole transfer's time",
    )
    yield line(
        "transfer, exposed share of moving",
        "%",
        lambda one: 100 * one.exposed_s / one.moved.moving_s,
        "exposed time over the time in which at least one segment was gathered, sent, received or scattered",
    )
    yield line(
        "transfer, exposed",
        "ms",
        lambda one: 1e3 * one.exposed_s,
        "from the end of the prompt's last forward pass on the prefill device (all layers and the last position's "
        "logits) to the end of the last landing on a decode rank",
    )
    yield line(
        "transfer, after the last KV",
        "ms",
        lambda one: 1e3 * one.after_kv_s,
        "from the last layer's write of the last chunk's KV to the end of the last landing; the part that is not "
        "exposed overlaps with that layer's attention and the rest of the pass",
    )
    yield line(
        "transfer, whole",
        "ms",
        lambda one: 1e3 * one.moved.whole.seconds,
        "from the start of the first gather to the end of the last landing; compute takes most of this time",
    )
    rates = (one.moved.nbytes / one.moved.moving_s / 1e9 for one in found.handovers)
    definition = "bytes landed, over the time in which at least one segment was moving"
    yield "transfer, rate while moving", _figure("transfer", "GB/s", rates), ceiling, definition


def _landed(found: HandoffMeasurements, labels: dict[str, Label]) -> Iterator[Line]:
    """Yields the figures of the landed bytes. `labels` must have `tokens`, the length of a prompt, and `bf16_bytes`,
    the size of the prompt's KV in bfloat16."""
    tokens, bf16_bytes = int(labels["tokens"]), int(labels["bf16_bytes"])
    landed_bytes = [one.moved.nbytes for one in found.handovers]
    definition = (
        f"bytes of landed segments, by the lengths that the transport reported, per prompt token, KV in "
        f"{labels['kv_dtype']}; a head that several decode ranks hold counts on each"
    )
    figure = _figure("transfer", "B/token", (nbytes / tokens for nbytes in landed_bytes))
    yield "transfer, landed", figure, None, definition
    figure = _figure("transfer", "x", (nbytes / bf16_bytes for nbytes in landed_bytes))
    yield "transfer, landed / bfloat16", figure, None, "the same, over the model's KV in bfloat16"


def _prefill(found: HandoffMeasurements) -> Iterator[Line]:
    whole = "from the start of the first chunk to the end of the last chunk on the device, over all ranks"
    times = {
        "sending": ([one.prefill_sending_s for one in found.handovers], f"{whole}; its KV is sent meanwhile"),
        "only": ([one.prefill_only_s for one in found.handovers], f"{whole}; same prompt, nothing is sent"),
    }
    slower = [one.prefill_sending_s / one.prefill_only_s for one in found.handovers]
    definition = (
        "prefill time while sending, divided by prefill-only time, of the same prompt on the same ranks"
    )
    yield "prefill, sending / only", _figure("prefill", "x", slower), None, definition
    for name, (seconds, definition) in times.items():
        yield f"prefill, {name}", _figure("prefill", "ms", (1e3 * s for s in seconds)), None, definition


def _decode(found: HandoffMeasurements) -> Iterator[Line]:
    for percent in _PERCENTS:
        times = {
            kind: [percentile(getattr(steps, kind), percent) for steps in found.rounds] for kind in _BESIDE
        }
        for base in ("quiet", "prefill"):
            slower = (a / b for a, b in zip(times["arriving"], times[base], strict=True))
            yield (
                f"decode p{percent}, arriving / {base}",
                _figure("decode", "x", slower),
                None,
                f"p{percent} of a round's steps with an arrival over p{percent} of those with {_BESIDE[base]}",
            )
        for kind, seconds in times.items():
            yield (
                f"decode p{percent}, {kind}",
                _figure("decode", "ms", (1e3 * s for s in seconds)),
                None,
                f"p{percent} of a round's steps on the leader, from the plan to the sampled tokens, of the decoders "
                f"alone, with {_BESIDE[kind]}",
            )


def _first_tokens(found: HandoffMeasurements) -> Iterator[Line]:
    for index, name in enumerate(("first", "second")):
        split = [one.split_s[index] for one in found.handovers]
        unsplit = [one.unsplit_s[index] for one in found.handovers]
        slower = (a / b for a, b in zip(split, unsplit, strict=True))
        yield (
            f"{name} token, split / unsplit",
            _figure("latency", "x", slower),
            None,
            "the two times below, of the same prompt",
        )
        for title, seconds, definition in (
            (
                "split",
                split,
                "from the request's start at the router to the token's arrival there; no other request is served",
            ),
            (
                "unsplit",
                unsplit,
                "the prefill group's engine prefills the same chunks and decodes, called directly, without a router",
            ),
        ):
            figure = _figure("latency", "ms", (1e3 * s for s in seconds))
            yield f"{name} token, {title}", figure, None, definition


def _compared(found: HandoffMeasurements) -> Iterator[Line]:
    definition = "tokens of the split system's answers, compared with the unsplit engine's; all are equal"
    if found.judged:
        worst = worst_of(found.judged)
        definition = (
            f"tokens of the split system's answers, compared with the unsplit engine's up to the first difference: "
            f"{len(found.judged)} answers differ, only where rounding decides. There, log-probabilities after "
            f"the same prefix differ by {worst.difference:.2g} at most (rounding explains {worst.explained:.2g}); "
            f"those of the two tokens differ by {worst.gap:.2g} ({2 * worst.explained:.2g})"
        )
    yield "answers, tokens compared", _figure("answers", "tokens", [found.compared_tokens]), None, definition
    share = 100 * (1 - len(found.judged) / found.compared_tokens)
    yield "answers, equal tokens", _figure("answers", "%", [share]), None, "share of the compared tokens"


def _figure(name: str, unit: str, values: Iterable[float]) -> Measurement:
    return Measurement(name, unit, tuple(values))
