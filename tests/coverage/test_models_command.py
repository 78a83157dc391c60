"""`disagg models`: verdicts on model types, their page, and processes that crash or hang."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bad_checks import ends_badly

from disagg.cli.app import run
from disagg.coverage import check
from disagg.coverage.page import render
from disagg.coverage.types import causal_types, chosen_types
from disagg.coverage.verdict import Verdict
from disagg.coverage.workers import check_types
from disagg.model.attention.paged import PagedStep

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
SAMPLE = ("gemma2", "camembert", "mixtral", "lfm2", "roformer", "hrm_text", "qwen3_5", "bart")
"""Windows; a tied head before the body; experts; convolutions; an encoder's type; stacks that run several times; the
text part of a multimodal one; one that is refused."""


def page_rows() -> dict[str, str]:
    """Of docs/models.md: each type's heading."""
    rows, heading = {}, ""
    for line in PAGE.read_text().splitlines():
        heading = line.removeprefix("## ") if line.startswith("## ") else heading
        if line.startswith("| `"):
            rows[line.split("`")[1]] = heading
    return rows


@pytest.mark.parametrize("model_type", SAMPLE)
def test_a_type_is_what_the_page_says(model_type: str) -> None:
    found = check.check_type(model_type)
    assert found.result.capitalize() == page_rows()[model_type], found.why


def test_the_page_has_every_type_once() -> None:
    assert sorted(page_rows()) == list(causal_types())
    assert PAGE.read_text().count("| `") == len(causal_types())


@pytest.mark.slow
def test_the_page_is_what_the_command_writes(tmp_path: Path) -> None:
    assert run(["models", "--check", "--out", str(tmp_path / "models.md")]) == 0
    assert (tmp_path / "models.md").read_bytes() == PAGE.read_bytes()


def test_wrong_tokens_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = check.unsplit_answers

    def wrong(*args: object) -> list[list[int]]:
        answers = right(*args)  # type: ignore[arg-type]
        answers[1][-1] += 1
        return answers

    monkeypatch.setattr(check, "unsplit_answers", wrong)
    found = check.check_type("llama")
    assert found.result == "wrong"
    assert found.why == "unsplit, chunks of 13: 1 of 72 tokens differ"


def test_attention_that_forgets_its_window_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = PagedStep.attend

    def without_window(step: Any, layer: int, *qkv: Any) -> Any:
        *tensors, params = qkv
        return attend(step, layer, *tensors, replace(params, window_tokens=None))

    monkeypatch.setattr(PagedStep, "attend", without_window)
    assert check.check_type("mistral").result == "wrong"


def test_a_process_that_crashes_or_hangs_ends_no_other() -> None:
    seen: list[str] = []
    found = check_types(
        ("good", "crashes", "hangs", "also good"),
        2,
        4.0,
        lambda one: seen.append(one.model_type),
        ends_badly,
        preload=(),
    )
    assert [one.result for one in found] == ["exact", "failed", "failed", "exact"]
    assert [one.why for one in found[1:3]] == ["its process ended with 3", "no verdict within 4 s"]
    assert sorted(seen) == ["also good", "crashes", "good", "hangs"]


def test_a_fault_is_named_and_ends_the_command_with_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = Verdict("llama", "wrong", "unsplit: 3 of 72 tokens differ")
    monkeypatch.setattr("disagg.coverage.workers.check_types", lambda *_: [bad])
    assert run(["models", "--check", "--types", "llama"]) == 1
    assert "not exact, and not refused: llama" in capsys.readouterr().out


def test_without_check_types_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--types", "llama,gpt2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [["llama", "LlamaForCausalLM"], ["gpt2", "GPT2LMHeadModel"]]
    assert chosen_types("") == causal_types()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--types", "no_such"], "no causal model of this type"),
        (["--out", "x.md"], "--out needs --check: only a check has results to write"),
        (["--check", "--types", "llama", "--out", "x.md"], "the page has all types"),
        (["--check", "--jobs", "-1"], "--jobs must be 0 or more"),
    ],
)
def test_flags_that_cannot_be(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_the_page_is_made_of_verdicts_alone() -> None:
    verdicts = [
        Verdict("mixtral", "exact", whole=("model.layers.*.mlp", "model.layers.*.mlp.experts", "attention")),
        Verdict("bart", "refused", "it has an encoder | and <more>"),
    ]
    facts = {"version": "5", "prompts": "1", "answers": 2, "window": 3, "chunks": "4"}
    page = render(verdicts, **facts)
    assert page == render(verdicts[::-1], **facts)
    assert "| `mixtral` | MixtralForCausalLM | mlp, attention |" in page
    assert "| `bart` | BartForCausalLM | it has an encoder \\| and &lt;more> |" in page
    assert "Wrong" not in page
