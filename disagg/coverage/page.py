"""Renders verdicts as `docs/models.md`. Equal verdicts give identical pages."""

from __future__ import annotations

import re
from collections.abc import Sequence

from disagg.coverage.types import class_of
from disagg.coverage.verdict import Verdict

_HEAD = """# Model types

transformers {version} has causal language models of {count} types. `disagg` serves {exact} of them exactly, and
refuses {refused} at start with a one-line error. This command writes the page:

    disagg models --check --out docs/models.md

The command builds a tiny model of each type, with random weights and all layer kinds of the type's default. It
compares greedy tokens with those of Hugging Face's `generate()` in float32 on a CPU. Prompts have
{prompts} tokens, answers {answers}, sliding windows {window}. *Exact* means that all tokens are equal in two
runs: one batch with chunks of {chunks} tokens, and a split system with two prefill ranks and one decode rank.
Encoder types are built as decoders (`is_decoder`).

A checkpoint of an exact type may still be refused for its configuration, such as the format of its weights.
"Held whole" names the parts that every rank of a group computes in full, because ranks cannot share them. It omits
what every rank always has: embeddings, output head, routers, and the latents of latent attention.

"""
_EXACT = "## Exact\n\n| model type | class | held whole by every rank |\n|---|---|---|\n"
_REFUSED = "\n## Refused\n\n| model type | class | reason |\n|---|---|---|\n"
_FAULTS = "\n## Wrong or undecided\n\n| model type | class | finding |\n|---|---|---|\n"


def render(verdicts: Sequence[Verdict], **facts: object) -> str:
    """Returns the text of the page, sorted by model type; `facts` are the values to insert into the introduction."""
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
    """Returns the last component of each name (`mlp` for `model.layers.*.mlp`), without parts inside other parts."""
    names = [name for name in whole if not any(name.startswith(f"{other}.") for other in whole)]
    return ", ".join(dict.fromkeys(re.sub(r"^.*\*\.", "", name) for name in names))
