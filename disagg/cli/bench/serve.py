"""`disagg bench serve`: converts flags to a run of `disagg.bench.serve`, and prints its results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.bench.common import OutputFlags, Shown, show
from disagg.cli.bench.compare import (
    CompareFlags,
    check_without_compare,
    parse_rates,
    progress,
    run_compare,
)
from disagg.cli.bench.load import LimitFlags, LoadFlags, PromptFlags
from disagg.cli.flags import ApiKeyFlag
from disagg.cli.options import with_options
from disagg.core.errors import ConfigError
from disagg.core.key_file import first_key

if TYPE_CHECKING:
    from disagg.bench.serve.bench import ServeBench

_OPEN_FILES = 65536
_URL = "http://127.0.0.1:8000/v1"


@dataclass(frozen=True, kw_only=True)
class TargetFlags:
    """Flags for the server under load."""

    url: Annotated[
        str | None, typer.Option("--url", help=f"Base URL of the API [{_URL}].", show_default=False)
    ] = None
    model: Annotated[
        str,
        typer.Option(
            "--model", help="Model [the server's first model]; with --compare, a checkpoint's folder."
        ),
    ] = ""
    api_key_file: ApiKeyFlag = None
    chat: Annotated[
        bool,
        typer.Option(
            "--chat",
            help="Send text to /chat/completions, one word per input token; otherwise ids to /completions.",
        ),
    ] = False

    @property
    def base_url(self) -> str:
        """The API's base URL. Raises `ConfigError` for a malformed `--url`."""
        from disagg.bench.serve.bench import check_url

        return check_url(self.url or _URL)

    @property
    def api_key(self) -> str | None:
        """The API key: the first line of the key file; None without a file."""
        return None if self.api_key_file is None else first_key("--api-key-file", self.api_key_file)


@dataclass(frozen=True, kw_only=True)
class BenchServeOptions:
    """Flags of `disagg bench serve`."""

    target: TargetFlags
    load: LoadFlags
    prompts: PromptFlags
    limits: LimitFlags
    strict: Annotated[
        bool, typer.Option("--strict", help="Exit code 1 when any request fails, except with a 429.")
    ] = False
    output: OutputFlags
    systems: CompareFlags


@with_options(BenchServeOptions)
def serve(options: BenchServeOptions) -> int:
    """Send load to any OpenAI-compatible endpoint: latencies, throughput, goodput. Every answer is checked.

    The first request is a probe and is not counted. The client measures all times. Answers have temperature 0.
    --compare starts a split and a colocated system one after the other, warms each up, and reports both side by side.
    """
    _check(options)
    from disagg.bench.serve.bench import run
    from disagg.bench.serve.chart import write_serve_chart
    from disagg.bench.serve.report import latency_table, lines, report_json

    loads = _loads(options)
    allow_open_files()
    systems = options.systems
    if systems.compare is not None:
        return run_compare(systems, options.target.model, loads, options.output, options.strict)
    with progress() as update:
        report = run(loads[0], lambda counts, total: update("requests", counts, total))
    shown = Shown(
        lambda: report_json(report),
        lambda: latency_table(report),
        lines(report),
        lambda path: write_serve_chart(path, report),
    )
    show("serve", shown, options.output)
    return 1 if report.summary.ok == 0 or (options.strict and report.summary.errors) else 0


def _check(options: BenchServeOptions) -> None:
    """Raises `ConfigError` for flags that contradict each other."""
    target, systems = options.target, options.systems
    if systems.compare is None:
        check_without_compare(systems)
    elif target.url is not None or target.api_key_file is not None:
        raise ConfigError("--compare starts its own servers: leave --url and --api-key-file out")
    options.limits.check()
    options.load.check(systems.rates, systems.compare is not None)


def _loads(options: BenchServeOptions) -> list[ServeBench]:
    """Returns the run at `--rate` or `--concurrency`, or one run for each of `--rates`.

    Each rate has its own prompts. With equal prompts, a run would hit the prefix cache entries of the run before.
    """
    rates = options.systems.rates
    chosen = [options.load.rate] if rates is None else parse_rates(rates)
    return [_load(options, rate, options.prompts.seed + number) for number, rate in enumerate(chosen)]


def _load(options: BenchServeOptions, rate: float | None, seed: int) -> ServeBench:
    from disagg.bench.serve.bench import ServeBench
    from disagg.bench.serve.summary import Slo

    target, load, limits = options.target, options.load, options.limits
    arrivals = load.arrivals_at(rate, seed)
    kind = None if arrivals is None else arrivals.kind
    model = target.model if options.systems.compare is None else ""
    return ServeBench(
        url=target.base_url,
        api_key=target.api_key,
        workload=options.prompts.workload(model, target.chat, seed),
        arrivals=arrivals,
        concurrency=load.concurrency,
        requests=load.request_count,
        duration_s=load.duration_s,
        slo=Slo(limits.slo_ttft_s, limits.slo_itl_s),
        timeout_s=limits.timeout_s,
        settings=_parameters(options) | {"rate": rate, "arrivals": kind, "seed": seed},
    )


def _parameters(options: BenchServeOptions) -> dict[str, str | float | bool | None]:
    """Returns the parameters that the report shows for every load."""
    target, load = options.target, options.load
    return {
        "url": None if options.systems.compare else target.url or _URL,
        "chat": target.chat,
        "burst_size": load.burst_size if load.arrivals == "burst" else None,
        "concurrency": load.concurrency,
        "requests": load.request_count,
        "duration_s": load.duration_s,
        **options.prompts.settings(target.chat),
        "timeout_s": options.limits.timeout_s,
    }


def allow_open_files() -> None:
    """Raises the soft limit of open files as far as permitted: an open loop may need thousands of sockets."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
