"""`disagg models`: flags for `disagg.coverage`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from disagg.core.errors import ConfigError
from disagg.core.folders import writing


def models(
    check: Annotated[
        bool,
        typer.Option("--check", help="Build a tiny model of each type; compare its tokens with generate()."),
    ] = False,
    types: Annotated[
        str, typer.Option("--types", metavar="A,B,..", help="Only these model types of transformers.")
    ] = "",
    jobs: Annotated[int, typer.Option("--jobs", help="Parallel processes; 0: one for each CPU.")] = 0,
    limit_s: Annotated[
        float, typer.Option("--limit-s", help="Seconds until the check of one type fails.")
    ] = 300.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE.md", help="Write the results as a Markdown page.")
    ] = None,
) -> None:
    """List the model types of transformers; with --check, test which are served exactly.

    Exit code 1 when the tokens of a type are wrong or its check fails.
    """
    if not check:
        if out is not None:
            raise ConfigError("--out needs --check: only a check has results to write")
        _list(types)
        return
    if jobs < 0 or limit_s <= 0:
        raise ConfigError(f"--jobs {jobs} --limit-s {limit_s:g}: --jobs must be 0 or more, --limit-s above 0")
    if out is not None and (types or not out.absolute().parent.is_dir()):
        raise ConfigError(
            f"--out {out}: the page has all types: omit --types, and name a file in an existing folder"
        )
    _check(types, jobs or os.cpu_count() or 1, limit_s, out)


def _list(types: str) -> None:
    from disagg.coverage.types import chosen_types, class_of

    for one in chosen_types(types):
        print(f"{one:<26} {class_of(one)}")


def _check(types: str, jobs: int, limit_s: float, out: Path | None) -> None:
    from disagg.coverage.page import verdict_line
    from disagg.coverage.types import chosen_types
    from disagg.coverage.workers import check_types

    verdicts = check_types(
        chosen_types(types), jobs, limit_s, lambda verdict: print(verdict_line(verdict), flush=True)
    )
    counts = {result: sum(one.result == result for one in verdicts) for result in ("exact", "refused")}
    faults = [one for one in verdicts if one.is_fault]
    print(
        f"{len(verdicts)} model types: {counts['exact']} exact, {counts['refused']} refused, {len(faults)} at fault"
    )
    if out is not None:
        from disagg.coverage.check import page_of

        with writing("--out", out):
            out.write_text(page_of(verdicts))
    if faults:
        print("not exact, and not refused: " + ", ".join(one.model_type for one in faults))
        raise typer.Exit(1)
