"""The hand-over benchmark: real ranks on a CPU, answers compared, and the arithmetic of its figures."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import torch

from disagg.bench.common.report import Label, Measurement
from disagg.bench.handoff.compare import AnswerComparison
from disagg.bench.handoff.figures import (
    RequestTransfer,
    Sorted,
    Window,
    arrival,
    moved,
    percentile,
    sort_steps,
    union_s,
    with_a_moment,
)
from disagg.bench.handoff.groups import HandoffGroups, spread_gpus
from disagg.bench.handoff.measure import HandoffMeasurements, HandOver
from disagg.bench.handoff.ranks import digests
from disagg.bench.handoff.results import results_of
from disagg.bench.handoff.sizes import Sizes
from disagg.cli.app import run
from disagg.core.errors import InvariantError, MismatchError
from disagg.core.timeline import TimelineSpan
from disagg.core.types import PROTOCOL_VERSION, GroupInfo, KVLayout, RequestKey, Shard, Span, TokenLogprobs
from disagg.model.rounding import Judge

SMALL = ["--device", "cpu", "--random-init", "tiny-llama", "--repeats", "1", "--tokens", "96"]
SHORT = ["--decoders", "2", "--decoder-tokens", "8", "--steps", "40", "--answer-tokens", "3"]
ENOUGH = ["--steps", "300"]
"""Decode steps for which some are quiet."""


@pytest.fixture(autouse=True)
def _no_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    rate = Measurement("raw UCX", "GB/s", (1.0,))
    monkeypatch.setattr("disagg.bench.common.ceilings.raw_rates", lambda *options: {4096: rate})


def test_the_command_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--prefill-tp", "2", "--decode-tp", "1", "--chunk-tokens", "40", "--layer-groups", "2"]
    assert run(["bench", "handoff", *SMALL, *SHORT, *ENOUGH, *sizes, "--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    found = json.loads((tmp_path / "bench_handoff.json").read_text())
    assert found["results"] == said["results"]
    lines = {line["title"]: line for line in found["results"]}
    for title in (
        "transfer, exposed share",
        "prefill, sending / only",
        "decode p50, arriving / quiet",
        "decode p99, arriving / quiet",
        "first token, split / unsplit",
    ):
        assert lines[title]["definition"]
        assert lines[title]["low"] <= lines[title]["median"] <= lines[title]["high"]
        assert lines[title]["labels"]["prefill_tp"] == 2
    assert lines["transfer, rate while moving"]["ceiling"]["measured"] == "device copy"
    assert 0 <= lines["transfer, exposed share"]["median"] <= 100
    assert lines["decode p99, quiet"]["labels"]["steps_quiet"] > 0
    assert {"raw UCX, messages of 4 KiB", "device copy, 32 MiB"} <= set(lines)
    assert (tmp_path / "bench_handoff.png").stat().st_size > 1000


@pytest.mark.slow
def test_kv_in_8_bits_lands_as_it_was_computed(capsys: pytest.CaptureFixture[str]) -> None:
    """Heads of 8: as many quantized values and a scale of 2 bytes, where bfloat16 takes 16 bytes."""
    assert run(["bench", "handoff", *SMALL, *SHORT, "--kv-dtype", "int8", "--json"]) == 0
    lines = {line["title"]: line for line in json.loads(capsys.readouterr().out)["results"]}
    landed = lines["transfer, landed"]
    assert landed["values"] == [2 * 2 * 4 * (8 + 2)], "layers, K and V, heads"
    assert landed["labels"]["kv_dtype"] == "int8"
    assert lines["transfer, landed / bfloat16"]["values"] == [0.625]


def test_kv_that_is_quantized_on_its_way_lands_quantized(capsys: pytest.CaptureFixture[str]) -> None:
    """Computed in float32, which takes 32 bytes a head; two ranks quantize their halves for one."""
    flags = [*SMALL, *SHORT, "--prefill-tp", "2", "--decode-kv-dtype", "float8_e4m3fn"]
    assert run(["bench", "handoff", *flags, "--json"]) == 0
    lines = {line["title"]: line for line in json.loads(capsys.readouterr().out)["results"]}
    landed = lines["transfer, landed"]
    assert landed["values"] == [2 * 2 * 4 * (8 + 2)]
    labels = landed["labels"]
    assert (labels["prefill_kv_dtype"], labels["kv_dtype"]) == ("float32", "float8_e4m3fn")
    assert labels["compared_tokens"] == 1, (
        "the unsplit engine is the prefill group's, which has no quantized KV"
    )
    assert lines["transfer, landed / bfloat16"]["values"] == [0.625]


def test_another_answer_is_no_figure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = HandoffGroups.unsplit

    def wrong(groups: HandoffGroups, prompt: list[int], max_tokens: int) -> tuple[list[int], float]:
        tokens, seconds = real(groups, prompt, max_tokens)
        return [*tokens[:-1], tokens[-1] ^ 1], seconds

    monkeypatch.setattr(HandoffGroups, "unsplit", wrong)
    assert run(["bench", "handoff", *SMALL, *SHORT, *ENOUGH]) == 1
    assert "differs from the unsplit engine's: token 3 of 3 is" in capsys.readouterr().err


def _compared(flags: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[float, float, str]:
    sizes = [*SMALL, *SHORT, "--dtype", "bfloat16", *flags]
    assert run(["bench", "handoff", *sizes, "--json"]) == 0
    lines = {line["title"]: line for line in json.loads(capsys.readouterr().out)["results"]}
    compared, equal = lines["answers, tokens compared"], lines["answers, equal tokens"]
    return compared["values"][0], equal["values"][0], compared["definition"]


def test_two_ranks_round_otherwise_than_one(capsys: pytest.CaptureFixture[str]) -> None:
    _, equal, said = _compared(["--prefill-tp", "2"], capsys)
    assert equal < 100
    assert "only where rounding decides" in said


@pytest.mark.slow
def test_in_the_deterministic_mode_every_token_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    tokens, equal, said = _compared(["--deterministic"], capsys)
    assert (equal, said[-13:]) == (100, "all are equal")
    assert tokens >= 2 * (3 + 1) + 2 * 40


class _Answering:
    """Stands in for both groups and their client: a split system that gives token 5, only just, and a judge."""

    def __init__(self, view: tuple[float, ...]) -> None:
        self.view, self.behind = view, []  # type: tuple[float, ...], list[object]

    async def logprobs(self, prompt: list[int], answer: list[int]) -> TokenLogprobs:
        self.behind.append((prompt, answer))
        return TokenLogprobs(7, -1.0, ((7, -1.0), (5, -1.1)))

    def judge(self, prompt: list[int], answer: list[int], compared: list[int]) -> Judge:
        self.behind.append((prompt, answer, compared))
        view = self.view if compared[0] == 5 else (-9.0, *self.view[1:])
        return Judge([7], [view], [tuple(one + 0.2 for one in view)])


def _check(client: _Answering, tokens: list[int], tokens_equal: bool = False) -> AnswerComparison:
    sizes = Sizes(8, 3, 1, 8, 2, 1, 9, tokens_equal=tokens_equal, quantized_values_differ=False)
    comparison = AnswerComparison(client, client, sizes)  # type: ignore[arg-type]
    asyncio.run(comparison.check([1, 2], tokens, [3, 7, 4], 3))
    return comparison


def test_the_first_difference_is_judged_behind_the_same_tokens() -> None:
    client = _Answering((-1.2, -1.0, -1.2, -1.0))
    found = _check(client, [3, 5, 8])
    assert client.behind == [([1, 2], [3]), ([1, 2], [3, 5], [5, 7, 5])]
    assert (found.tokens, len(found.judged), found.judged[0].position) == (2, 1, 1)
    assert _check(client, [3, 7, 4]).tokens == 3


@pytest.mark.parametrize(
    ("view", "tokens", "equal"),
    [
        ((-1.7, -1.0, -1.7, -1.0), [3, 5, 8], False),  # 5 is far less likely for the judge
        ((-1.2, -1.0, -1.2, -1.0), [3, 6, 8], False),  # 6 is not among the split system's likeliest
        ((-1.2, -1.0, -1.2, -1.0), [3, 5, 8], True),
    ],
)
def test_another_difference_is_a_failure(view: tuple[float, ...], tokens: list[int], equal: bool) -> None:
    with pytest.raises(
        MismatchError, match=f"differs from the unsplit engine's: .*token 2.* is {tokens[1]}, not 7"
    ):
        _check(_Answering(view), tokens, equal)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tokens", "5000"], "exceed the model's context of 1024"),
        (["--steps", "1020"], "--decoder-tokens with --steps"),
        (["--random-init", "nothing"], "unknown architecture"),
        (["--dtype", "float64"], "dtype"),
        (["--kv-dtype", "int4"], "kv_dtype = 'int4' is not allowed; it must be one of auto, int8"),
        (["--prefill-tp", "5"], "prefill.tp = 5"),
        (
            ["--decode-kv-dtype", "int4"],
            "kv_dtype = 'int4' is not allowed; it must be one of model, auto, int8",
        ),
        (["--kv-dtype", "int8", "--decode-kv-dtype", "auto"], "store KV in int8, decode groups in auto"),
    ],
)
def test_bad_input(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "handoff", *SMALL, *flags]) == 2
    assert said in capsys.readouterr().err


def _span(name: str, start_s: float, stop_s: float, request: str = "a#0", nbytes: int = 0) -> TimelineSpan:
    return TimelineSpan(name, "lane", request, start_s, stop_s, nbytes)


SPANS = [
    _span("compute", 0.0, 10.0, ""),
    _span("gather", 1.0, 2.0, nbytes=5),
    _span("send", 2.0, 3.0, nbytes=5),
    _span("receive", 2.5, 3.5, nbytes=5),
    _span("scatter", 3.5, 4.0, nbytes=5),
    _span("gather", 8.0, 8.5, nbytes=7),
    _span("scatter", 8.5, 11.0, nbytes=7),
    _span("scatter", 20.0, 21.0, "b#0", nbytes=9),
]


def test_a_transfer_is_exposed_after_its_prompt() -> None:
    found = moved(SPANS, "a#0")
    assert found.whole == Window(1.0, 11.0)
    assert found.moving_s == 6.0
    assert found.nbytes == 12
    assert found.exposed_s(10.0) == 1.0
    assert found.exposed_s(12.0) == 0.0
    assert found.exposed_s(0.0) == 10.0
    assert arrival(SPANS, "a#0") == Window(2.5, 11.0)


@pytest.mark.parametrize("figure", [moved, arrival])
def test_what_never_landed_is_no_figure(figure: object) -> None:
    with pytest.raises(ValueError, match="no span of c#0"):
        figure(SPANS, "c#0")  # type: ignore[operator]


def test_union_counts_a_moment_once() -> None:
    assert union_s([]) == 0.0
    assert union_s([Window(5.0, 6.0), Window(0.0, 4.0), Window(1.0, 2.0), Window(3.0, 5.0)]) == 6.0


def test_windows_are_chosen_by_moments() -> None:
    windows = [Window(0.0, 1.0), Window(1.5, 2.0), Window(3.0, 4.0)]
    assert with_a_moment(windows, [3.5, 0.5, 2.5, 9.0]) == [windows[0], windows[2]]
    assert with_a_moment(windows, []) == []


def test_percentiles_are_values() -> None:
    values = [float(i) for i in range(100, 0, -1)]
    assert [percentile(values, percent) for percent in (0, 50, 99, 100)] == [1.0, 50.0, 99.0, 100.0]
    assert percentile([3.0], 99) == 3.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_steps_are_sorted_by_what_happens_beside_them() -> None:
    steps = [Window(i, i + 0.5) for i in range(6)]
    found = sort_steps(
        steps,
        arrivals=[Window(1.2, 2.2)],
        prefills=[Window(4.4, 5.0)],
        others=[Window(0.9, 2.9), Window(3.4, 3.6)],
    )
    assert (len(found.quiet), len(found.prefill), len(found.arriving)) == (2, 1, 2)
    assert set(found.quiet) == {0.5}


@pytest.mark.parametrize(
    ("gpus", "tps", "places"),
    [
        ("", (2, 1), ([None, None], [None])),
        ("0", (2, 1), (["0", "0"], ["0"])),
        ("01", (2, 1), (["0", "0"], ["1"])),
        ("0123", (2, 2), (["0", "1"], ["2", "3"])),
        ("0123", (4, 2), (["0", "1", "0", "1"], ["2", "3"])),
        ("01", (1, 4), (["0"], ["1", "1", "1", "1"])),
    ],
)
def test_groups_share_gpus_by_the_placement_rule(
    gpus: str, tps: tuple[int, int], places: tuple[list[str | None], list[str | None]]
) -> None:
    assert spread_gpus(list(gpus), *tps) == places


def test_figures_are_of_each_repeat() -> None:
    one = HandOver(
        RequestTransfer(Window(1.0, 3.0), 0.5, 1000),
        exposed_s=0.1,
        after_kv_s=0.2,
        prefill_sending_s=2.2,
        prefill_only_s=2.0,
        split_s=(3.0, 3.3),
        unsplit_s=(2.0, 2.2),
    )
    steps = Sorted(quiet=[1.0, 2.0], prefill=[4.0], arriving=[1.5, 3.0])
    ceiling = Measurement("peer copy", "GB/s", (1e-5,))
    labels: dict[str, Label] = {"tokens": 8, "kv_dtype": "int8", "bf16_bytes": 2000}
    found = {r.title: r for r in results_of(HandoffMeasurements([one], [steps], 40), labels, ceiling)}
    expected = {
        "transfer, exposed share": 5.0,
        "transfer, exposed share of moving": 20.0,
        "transfer, exposed": 100.0,
        "transfer, after the last KV": 200.0,
        "transfer, whole": 2000.0,
        "transfer, rate while moving": 2e-6,
        "transfer, landed": 125.0,
        "transfer, landed / bfloat16": 0.5,
        "prefill, sending / only": 1.1,
        "decode p50, arriving / quiet": 1.5,
        "decode p99, arriving / quiet": 1.5,
        "decode p99, arriving / prefill": 0.75,
        "decode p50, arriving": 1500.0,
        "first token, split / unsplit": 1.5,
        "second token, split": 3300.0,
        "answers, tokens compared": 40,
        "answers, equal tokens": 100,
    }
    assert {title: found[title].measured.median for title in expected} == pytest.approx(expected)
    assert found["transfer, rate while moving"].share == pytest.approx(0.2)
    assert all(result.definition for result in found.values())
    assert found["decode p50, quiet"].labels == labels | {
        "steps_quiet": 2,
        "steps_prefill": 1,
        "steps_arriving": 2,
    }


def test_digests_of_parts_are_those_of_the_whole() -> None:
    pool = torch.randn(2, 2, 6, 4, 8).bfloat16()
    slots = torch.tensor([5, 0, 3])
    whole = digests(pool, slots, Shard(0, Span(0, 2), Span(0, 4)))
    elsewhere = torch.zeros(1, 2, 9, 2, 8).bfloat16()
    elsewhere[:, :, [1, 7, 2]] = pool[1:, :, slots, 1:3]
    part = digests(elsewhere, torch.tensor([1, 7, 2]), Shard(1, Span(1, 2), Span(1, 3)))
    assert part == {place: whole[place] for place in ((1, 1), (1, 2))}
    assert digests(pool, slots.flip(0), Shard(0, Span(0, 2), Span(0, 4))) != whole


def test_wrong_kv_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = object.__new__(HandoffGroups)
    groups.prefill, groups.decode = [], []
    layout = KVLayout(1, 2, 8, "float32")
    groups.decode_info = GroupInfo("decode", "decode", PROTOCOL_VERSION, "", layout, 1, "ucx", ())
    computed = [
        {(0, 0): (1, 2), (0, 1): (3, 4)},
        {(0, 1): (5, 4)},
    ]  # two ranks may round a shared head otherwise
    for held, right in (([{(0, 1): (5, 4)}, {(0, 0): (1, 2)}], True), ([{(0, 1): (1, 2)}], False)):
        answers = iter((computed, held))
        monkeypatch.setattr("disagg.bench.handoff.groups.call_all", lambda *args, a=answers: next(a))
        if right:
            groups.check_kv(RequestKey("x"), 1)
        else:
            with pytest.raises(InvariantError, match=r"rank 0 has wrong KV in 1 of 1 heads.*layer 0, head 1"):
                groups.check_kv(RequestKey("x"), 1)
