"""`disagg bench goodput`: flags for `disagg.bench.serve.goodput`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.bench.common import OutputFlags, Shown, show
from disagg.cli.bench.compare import progress
from disagg.cli.bench.load import PromptFlags, check_positive
from disagg.cli.bench.serve import TargetFlags, allow_open_files
from disagg.cli.options import with_options
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.serve.bench import ServeBench


@dataclass(frozen=True, kw_only=True)
class SearchFlags:
    """Flags for the limits of latency, and for the rates that are tried."""

    ttft_s: Annotated[
        float, typer.Option("--ttft-s", help="Limit of the time from the scheduled send to the first token.")
    ] = 0.2
    itl_s: Annotated[float, typer.Option("--itl-s", help="Limit of the time between two tokens.")] = 0.015
    share: Annotated[
        float, typer.Option("--share", help="Share of requests, and of tokens, that must meet their limit.")
    ] = 0.99
    rate: Annotated[float, typer.Option("--rate", help="First rate, in requests a second.")] = 4.0
    least_rate: Annotated[float, typer.Option("--least-rate", help="Lowest rate that is tried.")] = 0.25
    most_rate: Annotated[float, typer.Option("--most-rate", help="Highest rate that is tried.")] = 1024.0
    resolution: Annotated[
        float, typer.Option("--resolution", help="Relative accuracy of the result, e.g. 0.05 for 5 %.")
    ] = 0.05
    duration_s: Annotated[float, typer.Option("--duration-s", help="Time of sending at each rate.")] = 30.0
    least_requests: Annotated[
        int,
        typer.Option(
            "--least-requests",
            min=1,
            help="Smallest number of requests at each rate; low rates take longer than --duration-s. Of fewer than "
            "100 requests, none may miss a limit that 99 % must meet.",
        ),
    ] = 100
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Limit of one whole answer.")] = 120.0

    def requests(self, rate: float) -> int:
        """Number of requests that are sent at `rate`."""
        return max(self.least_requests, round(rate * self.duration_s))

    def check(self) -> None:
        """Raises `ConfigError` for values out of range."""
        check_positive(
            {
                "--ttft-s": self.ttft_s,
                "--itl-s": self.itl_s,
                "--rate": self.rate,
                "--least-rate": self.least_rate,
                "--most-rate": self.most_rate,
                "--resolution": self.resolution,
                "--duration-s": self.duration_s,
                "--timeout-s": self.timeout_s,
            }
        )
        if not 0 < self.share <= 1:
            raise ConfigError(f"--share {self.share:g}: give a number above 0, up to 1")
        if not self.least_rate <= self.rate <= self.most_rate:
            raise ConfigError(
                f"--rate {self.rate:g} is not between --least-rate {self.least_rate:g} and "
                f"--most-rate {self.most_rate:g}"
            )


@dataclass(frozen=True, kw_only=True)
class GoodputOptions:
    """Flags of `disagg bench goodput`."""

    target: TargetFlags
    prompts: PromptFlags
    searched: SearchFlags
    output: OutputFlags


@with_options(GoodputOptions)
def goodput(options: GoodputOptions) -> int:
    """Find the highest rate of requests at which latencies stay within limits, on any OpenAI-compatible endpoint.

    Each rate is an open loop with Poisson arrivals and prompts of its own. Exit code 1 if no rate meets the limits.
    """
    options.searched.check()
    from disagg.bench.serve.bench import run
    from disagg.bench.serve.goodput import (
        GoodputReport,
        GoodputTarget,
        RateResult,
        goodput_json,
        goodput_lines,
        goodput_table,
        rate_result,
        search,
        write_goodput_chart,
    )

    flags = options.searched
    target = GoodputTarget(flags.ttft_s, flags.itl_s, flags.share)
    allow_open_files()
    model, measured = options.target.model, 0
    with progress() as update:

        def measure(rate: float) -> RateResult:
            nonlocal model, measured
            load = _load(options, model, rate, options.prompts.seed + measured)
            report = run(load, lambda counts, total: update(f"{rate:.3g} requests/s", counts, total))
            model, measured = str(report.settings["model"]), measured + 1
            return rate_result(rate, report, target)

        results = search(measure, flags.rate, flags.least_rate, flags.most_rate, flags.resolution)
    found = GoodputReport(_settings(options) | {"model": model}, target, results)
    shown = Shown(
        lambda: goodput_json(found),
        lambda: goodput_table(found),
        goodput_lines(found),
        lambda path: write_goodput_chart(path, found),
    )
    show("goodput", shown, options.output)
    return 1 if found.goodput is None else 0


def _load(options: GoodputOptions, model: str, rate: float, seed: int) -> ServeBench:
    from disagg.bench.serve.arrivals import Arrivals
    from disagg.bench.serve.bench import ServeBench
    from disagg.bench.serve.summary import Slo

    flags = options.searched
    return ServeBench(
        url=options.target.base_url,
        api_key=options.target.api_key,
        workload=options.prompts.workload(model, options.target.chat, seed),
        arrivals=Arrivals("poisson", rate, 1, seed),
        concurrency=None,
        requests=flags.requests(rate),
        duration_s=None,
        slo=Slo(),  # `GoodputTarget` judges the report
        timeout_s=flags.timeout_s,
        settings={},
    )


def _settings(options: GoodputOptions) -> dict[str, str | float | bool | None]:
    """Returns the parameters that the report shows."""
    target, prompts = options.target, options.prompts
    return {
        "url": target.base_url,
        "chat": target.chat,
        "duration_s": options.searched.duration_s,
        "least_requests": options.searched.least_requests,
        "resolution": options.searched.resolution,
        **prompts.settings(target.chat),
        "seed": prompts.seed,
    }
