"""`disagg bench storage`: flags for `disagg.bench.storage.run`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from disagg.cli.bench.common import OutputFlags, RepeatsFlag, progress, show_results
from disagg.cli.options import with_options
from disagg.core.config.read import parse_bytes


@dataclass(frozen=True, kw_only=True)
class StorageOptions:
    """Flags of `disagg bench storage`."""

    backend: Annotated[Literal["files", "redis"], typer.Option("--backend", help="files or redis.")] = "files"
    folder: Annotated[
        Path | None,
        typer.Option(
            "--folder",
            metavar="DIR",
            help="Folder on the disk to measure [the system's folder for temporary files].",
        ),
    ] = None
    url: Annotated[
        str | None, typer.Option("--url", metavar="redis://HOST:PORT/DB", help="A Redis or Valkey server.")
    ] = None
    page_bytes: Annotated[str, typer.Option("--page-bytes", metavar="SIZE", help="Size of a page.")] = (
        "256KiB"
    )
    pages: Annotated[int, typer.Option("--pages", min=1, help="Pages of one call.")] = 512
    threads: Annotated[
        int, typer.Option("--threads", min=1, help="Threads of the storage for each direction.")
    ] = 8
    direct: Annotated[
        bool,
        typer.Option(
            "--direct/--no-direct",
            help="Bypass the page cache (direct I/O) where the file system supports that.",
        ),
    ] = True
    repeats: RepeatsFlag = 5
    output: OutputFlags


@with_options(StorageOptions)
def storage(options: StorageOptions) -> None:
    """Measure put and get of KV pages in a storage, as a share of plain reads and writes of the same bytes."""
    from disagg.bench.storage.run import StorageBench, run

    bench = StorageBench(
        options.backend,
        options.folder,
        options.url,
        parse_bytes(options.page_bytes),
        options.pages,
        options.threads,
        options.direct,
        options.repeats,
    )
    with progress() as update:
        results = run(bench, update)
    title = f"pages in {options.backend}, {options.threads} threads"
    if options.backend == "files":
        title += ", direct I/O" if results[0].labels["direct"] else ", page cache"
    show_results("storage", title, results, options.output)
