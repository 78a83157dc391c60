"""The report of `disagg bench agreement`: a table, explanations, JSON, and a chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from disagg.bench.agreement.figures import Agreement, AgreementResult
from disagg.bench.common.report import machine, provenance, short

if TYPE_CHECKING:
    from rich.table import Table

_COLORS = ("0.6", "#3b6ea5", "#e07b39", "#c0392b")


def agreement_table(found: AgreementResult) -> Table:
    """Returns a table with a row for each KV type."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    settings = found.settings
    title = (
        f"{settings['model']}, KV in {settings['dtype']} and in 8 bits: {settings['prompts']} greedy answers"
    )
    table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    steps = settings["logit_steps"]
    table.add_column("KV", no_wrap=True)
    for name in (
        "until the first\ndifference",
        "alike to\nthe end",
        "tokens\nequal",
        "logits off by,\nstep 1",
        f"steps\n1-{steps}",
        "pool: bytes\na token",
        "of\nbf16",
        "wire: bytes\na token",
        "of\nbf16",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        table.add_row(*_cells(row))
    return table


def _cells(row: Agreement) -> Iterator[str]:
    yield row.name
    yield f"{short(row.mean_until_tokens)} of {row.answer_tokens}"
    yield f"{row.whole_share:.0%}"
    yield f"{row.equal_share:.1%}"
    yield short(row.logit_errors[0])
    yield short(_mean_error(row))
    yield f"{row.pool_token_bytes}"
    yield f"{row.pool_ratio:.3f}"
    yield f"{row.wire_token_bytes:.0f}"
    yield f"{row.wire_ratio:.3f}"


def agreement_lines(found: AgreementResult) -> Iterator[str]:
    """Yields the definitions and the limits of the figures."""
    settings, reference = found.settings, found.reference
    dtype = settings["dtype"]
    yield (
        f"- reference: one engine that prefills and decodes, with KV in {dtype}; {settings['prompts']} prompts of "
        f"{settings['prompt_tokens']} random tokens, greedy answers of {settings['answer_tokens']}. Tokens until "
        "the first difference: mean over the prompts. Tokens equal: position by position, also after a difference"
    )
    yield (
        f"- {dtype}, other chunks: the reference once more, with prompts cut into other chunks. Only rounding causes "
        "the differences in this row; the cost of an 8-bit type is the difference between its row and this row"
    )
    yield (
        "- logits off by: mean absolute difference over prompts and vocabulary; both engines compute logits after "
        f"the reference's tokens. The logits' standard deviation is {short(reference.logit_std)}, the best logit is "
        f"{short(reference.gap)} above the second best (median), and an answer has "
        f"{short(reference.distinct_tokens)} different tokens (mean)"
    )
    if found.random:
        yield (
            "- the weights are random, so the logits are nearly flat, and a small error changes the best token; a "
            "trained model's best logit usually has a large margin. These figures do not measure answer quality"
        )
    yield (
        "- pool: the allocation's bytes over its slots; wire: the planner's segments for a prompt, TP 1 -> 1. "
        "`disagg bench handoff --kv-dtype` counts the bytes that land"
    )


def agreement_json(found: AgreementResult) -> str:
    """Returns all results as JSON, with the command, the machine and the time."""
    content = {
        **provenance(),
        "machine": machine(),
        "settings": found.settings,
        "random_weights": found.random,
        "reference": asdict(found.reference),
        "rows": [_row(row) for row in found.rows],
    }
    return json.dumps(content, indent=2)


def _row(row: Agreement) -> dict[str, Any]:
    return asdict(row) | {
        "mean_until_tokens": row.mean_until_tokens,
        "whole_share": row.whole_share,
        "equal_share": row.equal_share,
        "mean_logit_error": _mean_error(row),
        "pool_ratio": row.pool_ratio,
        "wire_ratio": row.wire_ratio,
    }


def _mean_error(row: Agreement) -> float:
    return sum(row.logit_errors) / len(row.logit_errors)


def write_agreement_chart(path: Path, found: AgreementResult) -> None:
    """Writes a PNG: the share of answers that still equal the reference's, by number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4.5), layout="constrained")
    axis: Any = figure.subplots()
    for row, color in zip(found.rows, _COLORS, strict=True):
        tokens = range(row.answer_tokens + 1)
        axis.step(
            tokens, [row.alike_after(count) for count in tokens], where="post", color=color, label=row.name
        )
    settings = found.settings
    axis.set_title(
        f"{settings['model']}{', random weights' if found.random else ''}: greedy answers, KV in 8 bits and in "
        f"{settings['dtype']}",
        loc="left",
        fontsize=11,
    )
    axis.set_xlabel("tokens")
    axis.set_ylabel("answers equal so far")
    axis.set_ylim(0, 1.02)
    axis.set_xlim(left=0)
    axis.legend(loc="best", frameon=False, fontsize=9)
    axis.grid(alpha=0.3)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
