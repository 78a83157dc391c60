"""Renders verdicts as `docs/models.md`; equal verdicts give equal bytes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from disagg.coverage.types import class_of
from disagg.coverage.verdict import Verdict

_HEAD = """# Model types

Every model type that transformers {version} has a causal language model for: {exact} of {count} are served exactly,
{refused} are refused at start, in one line. Made by

    disagg models --check --out docs/models.md

which builds each type tiny, with random weights and layers of every kind that the type has by default, and compares
greedy tokens with those of Hugging Face's `generate()` in float32 on a CPU: prompts of {prompts} tokens, answers of
{answers}, sliding windows of {window}. *Exact*: all tokens are the same, with all prompts in one batch in chunks of
{chunks} tokens, and split, where two ranks prefill and one decodes. Types made from encoders are built as decoders
(`is_decoder`).

A checkpoint of an exact type may still be refused for what its own configuration asks, quantized weights for example.
"Held whole" names the parts that each rank of a group computes alike, because they cannot be split exactly.

"""
_EXACT = "## Exact\n\n| model type | class | held whole by every rank |\n|---|---|---|\n"
_REFUSED = "\n## Refused\n\n| model type | class | reason |\n|---|---|---|\n"
_FAULTS = "\n## Wrong, or not decided\n\n| model type | class | what was found |\n|---|---|---|\n"


def render(verdicts: Sequence[Verdict], **facts: object) -> str:
    """Returns the page, sorted by model type; `facts` are the figures in its first lines."""
    ordered = sorted(verdicts, key=lambda one: one.model_type)
    exact = [one for one in ordered if one.result == "exact"]
    refused = [one for one in ordered if one.result == "refused"]
    faults = [one for one in ordered if one.is_fault]
    page = _HEAD.format(count=len(ordered), exact=len(exact), refused=len(refused), **facts)
    page += _EXACT + "".join(_row(one, _parts(one.whole)) for one in exact)
    page += _REFUSED + "".join(_row(one, one.why) for one in refused)
    if faults:
        page += _FAULTS + "".join(_row(one, f"{one.result}: {one.why}") for one in faults)
    return page


def verdict_line(one: Verdict) -> str:
    """Returns the verdict as one line for a terminal or a log."""
    return f"{one.model_type:<26} {one.result}{': ' if one.why else ''}{one.why}"


def _row(one: Verdict, text: str) -> str:
    escaped = text.replace("|", "\\|").replace("<", "&lt;")
    return f"| `{one.model_type}` | {class_of(one.model_type)} | {escaped} |\n"


def _parts(whole: Sequence[str]) -> str:
    """Returns the last names of parts, `mlp` for `model.layers.*.mlp`, without parts inside other parts."""
    names = [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]
    return ", ".join(dict.fromkeys(re.sub(r"^.*\*\.", "", name) for name in names))
