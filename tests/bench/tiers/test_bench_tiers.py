"""The benchmark of the tiers: each hit comes from its tier, answers are compared, and wrong ones are no figures."""

from __future__ import annotations

import asyncio
import json
import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from disagg.bench.common.report import Measurement
from disagg.bench.tiers.engine import TierCounts, TiersEngine, TimedAnswer
from disagg.bench.tiers.options import TiersOptions
from disagg.bench.tiers.others import HitPlace, OtherSizes, OthersRun, OthersRuns
from disagg.bench.tiers.peer import PeerRun
from disagg.bench.tiers.results import results_of
from disagg.bench.tiers.run import TiersMeasurements, measure
from disagg.bench.tiers.ttft import TtftRun, TtftSizes
from disagg.bench.tiers.turns import TurnsRun
from disagg.cli.app import run
from disagg.core.config.read import Config, ModelConfig
from disagg.core.errors import InvariantError
from disagg.core.prefixes import Tier

SMALL = ["--device", "cpu", "--random-init", "tiny-llama", "--repeats", "1", "--tokens", "64"]
SHORT = [
    "--new-tokens",
    "8",
    "--answer-tokens",
    "2",
    "--turns",
    "2",
    "--turn-tokens",
    "20",
    "--concurrency",
    "2",
    "--others",
    "2",
]
COMMAND = ["bench", "tiers", *SMALL, *SHORT, "--transport", "tls"]


def test_the_command_writes_figures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "disk"
    folder.mkdir()
    parts = ["--parts", "hits,storage,peer,conversations"]
    assert run([*COMMAND, *parts, "--folder", str(folder), "--out", str(tmp_path), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert json.loads((tmp_path / "bench_tiers.json").read_text())["results"] == said["results"]
    lines = {line["title"]: line for line in said["results"]}
    for place, ceiling in (
        ("hit in the KV pool", None),
        ("hit in host memory", "pool hit + plain copy"),
        ("hit in another group's host memory", "pool hit + plain transfer"),
        ("hit in the storage", "pool hit + plain read"),
        ("no hit", None),
    ):
        line = lines[f"TTFT, {place}"]
        assert (line["unit"], len(line["values"])) == ("ms", 1)
        assert line.get("ceiling", {}).get("name") == ceiling
        assert line["labels"]["transport"] == "tls"
    hits = {
        tiers: [lines[f"hits in {place}, {tiers}"]["median"] for place in ("host memory", "the storage")]
        for tiers in ("no lower tier", "host memory", "host memory and storage")
    }
    assert hits["no lower tier"] == [0, 0]
    assert hits["host memory"][0] > 0 == hits["host memory"][1]
    assert hits["host memory and storage"][1] > 0
    assert all(lines[f"requests, {tiers}"]["median"] > 0 for tiers in hits)
    assert lines["load hidden under compute"]["unit"] == "%"
    assert (tmp_path / "bench_tiers.png").stat().st_size > 1000
    assert list(folder.iterdir()) == []


def test_a_disk_that_is_too_small_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_run(_: TtftRun) -> Any:
        raise AssertionError("measured in spite of a small disk")

    monkeypatch.setattr(TtftRun, "run", no_run)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=32 << 20))
    assert run([*COMMAND, "--folder", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert "has 32 MiB free, the run needs 64 MiB: name another --folder, or lower --tokens" in said
    assert list(tmp_path.iterdir()) == []


def test_parts_can_be_chosen(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--folder", str(tmp_path), "--json", "--parts", "hits,others"]) == 0
    lines = {line["title"]: line for line in json.loads(capsys.readouterr().out)["results"]}
    assert "TTFT, hit in host memory" in lines
    assert not [title for title in lines if "storage" in title or "conversations" in title]
    for percent in (50, 99):
        beside = [
            lines[f"time between tokens of other answers p{percent}, {place}"]
            for place in ("hits in the KV pool", "hits in host memory")
        ]
        assert all(line["labels"]["hits"] > 0 < line["median"] for line in beside)
        assert beside[1]["ceiling"]["values"] == beside[0]["values"]
    assert run([*COMMAND, "--parts", "hits,all"]) == 2
    assert (
        "--parts hits,all: give one or more of hits,storage,peer,conversations,others"
        in capsys.readouterr().err
    )


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*COMMAND, "--folder", str(tmp_path), "--random-init", "tiny-granite-h"]) == 2
    assert "has recurrent layers, whose hits this benchmark cannot place" in capsys.readouterr().err


def test_wrong_answers_are_no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    generate = TiersEngine.generate

    async def wrong(self: TiersEngine, prompt: Any, max_tokens: int, salt: str = "") -> TimedAnswer:
        answer = await generate(self, prompt, max_tokens, salt)
        return answer if salt else answer._replace(tokens=[(token + 1) % 250 for token in answer.tokens])

    monkeypatch.setattr(TiersEngine, "generate", wrong)
    with pytest.raises(InvariantError, match="differs from the answer without a hit"):
        _measure()


def test_a_hit_from_another_tier_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing leaves the pool, so the hit that is to come from host memory comes from there."""

    async def keep(self: TtftRun, text: Any, place: Any) -> None:
        pass

    monkeypatch.setattr(TtftRun, "_evict", keep)
    with pytest.raises(InvariantError, match=r"a hit of 64 tokens in host came from {.device.: 64"):
        _measure()


def _measure() -> None:
    options = TiersOptions(
        config=Config(model=ModelConfig(random_init="tiny-llama", deterministic=True)),
        cuda=False,
        folder=None,
        tokens=64,
        new_tokens=8,
        answer_tokens=4,
        turns=3,
        turn_tokens=20,
        concurrency=2,
        others=2,
        repeats=1,
    )
    measure(options, lambda text: None)


class PoolOnly:
    """An engine whose hits all come from the pool, and whose answers differ if `differs`."""

    def __init__(self, differs: bool) -> None:
        self.differs, self.hits, self.answers = differs, 0, 0

    async def settle(self) -> None:
        pass

    def cached_tokens(self, text: Any, tier: Tier) -> int:
        return len(text)

    def counts(self) -> TierCounts:
        return TierCounts(64 * self.hits, 0, 0)

    async def generate(self, prompt: Any, max_tokens: int, salt: str = "") -> TimedAnswer:
        self.hits += len(prompt) > 64
        self.answers += bool(salt)
        return TimedAnswer([self.answers if self.differs else 1], 0.1, 0.001, [0.1, 0.2])


@pytest.mark.parametrize("differs", [False, True])
def test_answers_beside_hits_are_checked(differs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hits in host memory that came from the pool are no figures, nor are answers that differ between rounds."""
    sizes = OtherSizes(64, 8, 1, others=2, other_tokens=2, documents=2, repeats=1, vocabulary=250)
    runs = OthersRuns(cast(TiersEngine, PoolOnly(differs)), sizes, lambda text: None)

    async def rounds() -> None:
        for _ in range(2):
            await runs._round("device", 0.0, [])  # noqa: SLF001

    if differs:
        with pytest.raises(InvariantError, match="other tokens than in the first round"):
            asyncio.run(rounds())
    else:
        with pytest.raises(
            InvariantError, match=r"1 hits of 64 tokens in host came from {'device': 64, 'host': 0}"
        ):
            asyncio.run(runs.run())


class OneOfTwoGroups:
    """An engine of a run with two groups; `came`: from where each measured hit comes."""

    def __init__(self, came: TierCounts, answer: list[int]) -> None:
        self.came, self.answer = came, answer
        self.counted, self.published = TierCounts(0, 0, 0), 0

    async def share_with(self, owner: OneOfTwoGroups) -> None:
        pass

    async def learn_items(self, owner: OneOfTwoGroups) -> None:
        assert owner.published == 64

    async def settle(self) -> None:
        pass

    def published_tokens(self) -> int:
        return self.published

    def counts(self) -> TierCounts:
        return self.counted

    async def generate(self, prompt: Any, max_tokens: int, salt: str = "") -> TimedAnswer:
        if len(prompt) == 64:
            self.published += 32  # a part of it with each use
        elif not salt:
            self.counted = TierCounts(*map(sum, zip(self.counted, self.came, strict=True)))
        return TimedAnswer([1, 2, 3] if salt else self.answer, 0.5, 0.6)


@pytest.mark.parametrize(
    ("came", "answer", "error"),
    [
        (TierCounts(0, 0, 64), [1, 2, 3], ""),
        (TierCounts(0, 0, 64), [1, 2, 4], "differs from the answer without a hit"),
        (TierCounts(0, 0, 32), [1, 2, 3], r"64 tokens in another group came from \(0, 0, 32\)"),
        (TierCounts(64, 0, 0), [1, 2, 3], r"64 tokens in another group came from \(64, 0, 0\)"),
    ],
)
def test_only_hits_in_another_group_are_figures(came: TierCounts, answer: list[int], error: str) -> None:
    reader, owner = OneOfTwoGroups(came, answer), OneOfTwoGroups(came, answer)
    sizes = TtftSizes(tokens=64, new_tokens=8, answer_tokens=3, repeats=0, vocabulary=250)
    run = PeerRun(cast(TiersEngine, reader), cast(TiersEngine, owner), sizes, lambda text: None)
    with pytest.raises(InvariantError, match=error) if error else nullcontext():
        asyncio.run(run.run())
    assert run.ttft_s == []  # the first one is dropped


RATES = {"host": 1.0, "peer": 2.0, "storage": 1.0}
"""Of plain copies, in GB/s."""


def test_the_arithmetic_of_the_figures() -> None:
    run = TurnsRun(2.0, [0.1, 0.2, 0.3], 1000, TierCounts(100, 200, 300), [[1], [2]])
    ttft_s = {"device": [0.1], "host": [0.15], "peer": [0.25], "storage": [0.2], "nowhere": [0.6]}
    plain = {place: Measurement(place, "GB/s", (rate,)) for place, rate in RATES.items()}
    gaps: dict[HitPlace, list[OthersRun]] = {
        "device": [OthersRun([0.01, 0.02], 3)],
        "host": [OthersRun([0.01, 0.03], 4)],
    }
    results = results_of(TiersMeasurements(ttft_s, plain, 10**8, {"host memory": run}, gaps, {}))
    found = {result.title: result for result in results}
    values = {title: result.measured.median for title, result in found.items()}
    assert values["router.host_load_cost"] == pytest.approx(0.1)
    assert values["router.storage_load_cost"] == pytest.approx(0.2)
    assert found["TTFT, hit in host memory"].ceiling == Measurement("pool hit + plain copy", "ms", (200.0,))
    assert values["load hidden under compute"] == pytest.approx(50), "50 of the copy's 100 ms"
    late = found["time between tokens of other answers p99, hits in host memory"]
    assert (late.measured.values, late.labels["hits"]) == ((30.0,), 4)
    assert late.share == pytest.approx(1.5)
    assert values["time between tokens of other answers p50, hits in host memory"] == 10
    peer = found["TTFT, hit in another group's host memory"]
    assert peer.ceiling is not None
    assert (peer.ceiling.name, *peer.ceiling.values) == ("pool hit + plain transfer", pytest.approx(150.0))
    assert peer.share == pytest.approx(250 / 150)
    assert values["plain transfer, messages of 4 MiB"] == 2
    assert found["TTFT, hit in the storage"].share == pytest.approx(1.0)
    assert values["requests, host memory"] == 1.5
    assert values["TTFT p50, host memory"] == pytest.approx(200)
    hits = [
        values[f"hits in {place}, host memory"] for place in ("the KV pool", "host memory", "the storage")
    ]
    assert hits == [10, 20, 30]
