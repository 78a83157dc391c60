"""`disagg bench serve`: flags to a run, its progress, and what is printed and written."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from disagg.cli_bench_common import OutFlag, Shown, show
from disagg.cli_bench_compare import (
    CheckEqualFlag,
    ColocatedTpFlag,
    CompareFlag,
    RatesFlag,
    check_flags,
    parse_rates,
    progress,
    run_compare,
)
from disagg.cli_run import (
    ChunkTokensFlag,
    ConfigFlag,
    DecodeTpFlag,
    DeterministicFlag,
    DeviceFlag,
    DTypeFlag,
    PrefillTpFlag,
    RandomInitFlag,
    SetFlag,
)
from disagg.core.errors import ConfigError
from disagg.core.key_file import first_key

_OPEN_FILES = 65536
_URL = "http://127.0.0.1:8000/v1"


def serve(
    url: Annotated[
        str | None, typer.Option("--url", help=f"Where the API begins [{_URL}].", show_default=False)
    ] = None,
    model: Annotated[
        str,
        typer.Option(
            "--model", help="[the first one that the server names]; with --compare a checkpoint's folder."
        ),
    ] = "",
    api_key_file: Annotated[
        Path | None, typer.Option("--api-key-file", metavar="FILE", help="Its first line is the key.")
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Text to /chat/completions, a word for each input token; else ids to /completions."
        ),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Open loop: requests a second, sent whether others are answered or not."),
    ] = None,
    arrivals: Annotated[
        Literal["poisson", "fixed", "burst"] | None,
        typer.Option("--arrivals", help="Of an open loop [poisson]."),
    ] = None,
    burst_size: Annotated[
        int, typer.Option("--burst-size", min=1, help="Requests that come at once with --arrivals burst.")
    ] = 8,
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="Closed loop: so many requests are under way at any time."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", min=1, help="How many [100, without --duration-s].")
    ] = None,
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", help="How long requests are sent, instead of how many.")
    ] = None,
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens",
            metavar="SPEC",
            help="512, 128-1024, lognormal:MEAN,SIGMA[,MAX], or sharegpt-like: a lognormal model of such prompts.",
        ),
    ] = "512",
    output_tokens: Annotated[
        str,
        typer.Option("--output-tokens", metavar="SPEC", help="As --input-tokens; at most, or --ignore-eos."),
    ] = "128",
    shared_prefix_tokens: Annotated[
        int, typer.Option("--shared-prefix-tokens", min=0, help="In front of the input tokens.")
    ] = 0,
    shared_prefixes: Annotated[
        int, typer.Option("--shared-prefixes", min=1, help="How many different ones there are.")
    ] = 1,
    token_ids: Annotated[
        str,
        typer.Option(
            "--token-ids",
            metavar="LOW-HIGH",
            help="Range of random ids in prompts; by default such as every vocabulary has.",
        ),
    ] = "32-255",
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos", help="Every answer has exactly its output tokens, and is checked for it."
        ),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Of arrivals, lengths and prompts.")] = 0,
    slo_ttft_s: Annotated[
        float | None, typer.Option("--slo-ttft-s", help="Goodput: first tokens within so long.")
    ] = None,
    slo_itl_s: Annotated[
        float | None,
        typer.Option(
            "--slo-itl-s", help="Goodput: tokens after the first within so long, by an answer's mean."
        ),
    ] = None,
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Of one whole answer.")] = 600.0,
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 when any request fails, but for a 429.")
    ] = False,
    out: OutFlag = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="For machines: print figures and requests as JSON.")
    ] = False,
    compare: CompareFlag = None,
    rates: RatesFlag = None,
    check_equal: CheckEqualFlag = False,
    random_init: RandomInitFlag = None,
    dtype: DTypeFlag = None,
    deterministic: DeterministicFlag = None,
    prefill_tp: PrefillTpFlag = None,
    decode_tp: DecodeTpFlag = None,
    colocated_tp: ColocatedTpFlag = None,
    device: DeviceFlag = None,
    chunk_tokens: ChunkTokensFlag = None,
    config: ConfigFlag = None,
    settings: SetFlag = None,
) -> int:
    """Load against any OpenAI-compatible endpoint: latencies, throughput, goodput; every answer checked.

    One request that is not counted comes first. Times are taken where the client is, answers at temperature 0. With
    --compare two systems of this program are started here, one after the other, warmed up, and reported side by side.
    """
    given = dict(locals())  # the flags by parameter name, before anything else is assigned
    check_flags(given)
    from disagg.bench.serve.arrivals import Arrivals
    from disagg.bench.serve.bench import ServeBench, check_url, run
    from disagg.bench.serve.chart import write_serve_chart
    from disagg.bench.serve.lengths import parse_lengths
    from disagg.bench.serve.report import latency_table, lines, report_json
    from disagg.bench.serve.summary import Slo
    from disagg.bench.serve.workload import Workload

    _positive(
        {
            "--rate": rate,
            "--duration-s": duration_s,
            "--timeout-s": timeout_s,
            "--slo-ttft-s": slo_ttft_s,
            "--slo-itl-s": slo_itl_s,
        }
    )
    if [rate, rates, concurrency].count(None) != 2:
        several = "" if compare is None else ", --rates (one after the other)"
        raise ConfigError(f"give either --rate (an open loop){several} or --concurrency (a closed one)")
    if concurrency is not None and arrivals is not None:
        raise ConfigError(
            f"--arrivals {arrivals} needs --rate: with --concurrency answers decide when requests go"
        )
    if requests is not None and duration_s is not None:
        raise ConfigError("give either --requests or --duration-s")
    if requests is None and duration_s is None:
        requests = 100
    workload = Workload(
        model=model if compare is None else "",
        chat=chat,
        input=parse_lengths("--input-tokens", input_tokens),
        output=parse_lengths("--output-tokens", output_tokens),
        prefix_tokens=shared_prefix_tokens,
        prefixes=shared_prefixes,
        token_ids=_token_ids(token_ids),
        ignore_eos=ignore_eos,
        seed=seed,
    )
    asked = {
        "url": None if compare else url or _URL,
        "chat": chat,
        "burst_size": burst_size if arrivals == "burst" else None,
        "concurrency": concurrency,
        "requests": requests,
        "duration_s": duration_s,
        "input_tokens": input_tokens,
        "output_tokens": output_tokens,
        "shared_prefix_tokens": shared_prefix_tokens,
        "shared_prefixes": shared_prefixes,
        "token_ids": None if chat else token_ids,
        "ignore_eos": ignore_eos,
        "timeout_s": timeout_s,
    }

    def load_of(rate: float | None, seed: int) -> ServeBench:
        open_loop = None if rate is None else Arrivals(arrivals or "poisson", rate, burst_size, seed)
        kind = None if open_loop is None else open_loop.kind
        return ServeBench(
            url=check_url(url or _URL),
            api_key=None if api_key_file is None else first_key("--api-key-file", api_key_file),
            workload=replace(workload, seed=seed),
            arrivals=open_loop,
            concurrency=concurrency,
            requests=requests,
            duration_s=duration_s,
            slo=Slo(slo_ttft_s, slo_itl_s),
            timeout_s=timeout_s,
            asked=asked | {"rate": rate, "arrivals": kind, "seed": seed},
        )

    # Each rate has prompts of its own: what a server keeps of one must not help it at the next.
    chosen = [rate] if rates is None else parse_rates(rates)
    loads = [load_of(one, seed + number) for number, one in enumerate(chosen)]
    _allow_open_files()
    if compare is not None:
        return run_compare(given | {"model": model or None}, loads)
    with progress() as tell:
        report = run(loads[0], lambda counts, total: tell("requests", counts, total))
    found = Shown(
        lambda: report_json(report),
        lambda: latency_table(report),
        lines(report),
        lambda path: write_serve_chart(path, report),
    )
    show("serve", found, out, as_json)
    return 1 if report.summary.ok == 0 or (strict and report.summary.errors) else 0


def _positive(flags: dict[str, float | None]) -> None:
    for flag, value in flags.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: give a number above 0")


def _token_ids(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d+)-(\d+)", text)
    if found is None or int(found[1]) > int(found[2]):
        raise ConfigError(f"--token-ids {text}: give the lowest and the highest id, as 32-255")
    return int(found[1]), int(found[2])


def _allow_open_files() -> None:
    """As many connections as the system lets a process have without asking: an open loop may need thousands."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
