"""The memory benchmark: figures with their ceilings, and an error where the counts do not add up."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from disagg.bench.engine import memory as bench
from disagg.bench.engine.memory_waste import waste
from disagg.bench.serve.lengths import Lengths, parse_lengths
from disagg.cli.app import run
from disagg.core.errors import InvariantError
from disagg.kv.pages import TokenToKVPoolAllocator
from disagg.kv.radix import RadixCache

SMALL = ["--cached-tokens", "2048", "--prompt-tokens", "64", "--requests", "8", "--repeats", "2"]
LENGTHS = ["--input-tokens", "4-40", "--output-tokens", "4-40"]


def test_the_command_writes_figures_and_a_chart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory", *SMALL, *LENGTHS, "--out", str(tmp_path)]) == 0
    assert "match and insert" in capsys.readouterr().out
    found = {
        line["title"]: line for line in json.loads((tmp_path / "bench_memory.json").read_text())["results"]
    }
    parts = [line["median"] for title, line in found.items() if title.startswith("of that")]
    assert len(parts) == 3
    assert 0 < max(parts) < found["match and insert"]["high"]
    assert found["match and insert"]["ceiling"]["median"] > 0
    assert found["decode step, 8 requests"]["ceiling"]["median"] > 0
    assert (
        0
        < found["slots wasted"]["median"]
        < found["slots wasted, if all are reserved at the start"]["median"]
    )
    assert (tmp_path / "bench_memory.png").stat().st_size > 1000


def test_waste_of_conversations_in_pages_of_16_is_small() -> None:
    prompts = parse_lengths("--input-tokens", "sharegpt-like")
    answers = parse_lengths("--output-tokens", "sharegpt-like")
    lazy, early = waste(16, 32, prompts, answers, 1)
    assert 1 < lazy.measured.median < 4
    assert lazy.share == pytest.approx(1, abs=0.15), "last pages are half full on average"
    assert early.measured.median > 30


def test_pages_of_one_token_waste_nothing() -> None:
    lazy, _ = waste(1, 4, Lengths(1, 9), Lengths(1, 9), 1)
    assert lazy.measured.median == 0
    assert lazy.ceiling is None


def test_a_cache_that_finds_nothing_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RadixCache.match
    monkeypatch.setattr(RadixCache, "match", lambda self, key, limit: real(self, key, 0))
    options = bench.MemoryBench(4, 2048, 64, 4, Lengths(4, 4), Lengths(4, 4), "lru", 1)
    with pytest.raises(InvariantError, match="were not found"):
        bench.run(options)


def test_a_step_that_gives_no_pages_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TokenToKVPoolAllocator, "append_one_to_each", lambda self, growing: None)
    options = bench.MemoryBench(4, 2048, 64, 4, Lengths(4, 4), Lengths(4, 4), "lru", 1)
    with pytest.raises(InvariantError, match="gave None"):
        bench.run(options)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prompt-tokens", "16"], "two pages of 16"),
        (["--cached-tokens", "5000"], "65536 or more"),
        (["--input-tokens", "many"], "--input-tokens many"),
        (["--eviction", "random"], "eviction"),
    ],
)
def test_bad_input(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "memory", *flags]) == 2
    assert said in capsys.readouterr().err
