"""Flags for the load of `disagg bench serve`: arrivals, prompts, and limits of an answer's latency."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.serve.arrivals import Arrivals
    from disagg.bench.serve.workload import Workload

_REQUESTS = 100


@dataclass(frozen=True, kw_only=True)
class LoadFlags:
    """Flags for the number of requests and the times at which they are sent."""

    rate: Annotated[
        float | None,
        typer.Option("--rate", help="Open loop: requests a second, sent without waiting for answers."),
    ] = None
    arrivals: Annotated[
        Literal["poisson", "fixed", "burst"] | None,
        typer.Option("--arrivals", help="Arrival process of an open loop [poisson]."),
    ] = None
    burst_size: Annotated[
        int, typer.Option("--burst-size", min=1, help="Requests of one burst, with --arrivals burst.")
    ] = 8
    concurrency: Annotated[
        int | None,
        typer.Option("--concurrency", min=1, help="Closed loop: number of requests in flight at any time."),
    ] = None
    requests: Annotated[
        int | None,
        typer.Option("--requests", min=1, help=f"Number of requests [{_REQUESTS}, without --duration-s]."),
    ] = None
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", help="Send requests for this time, instead of --requests.")
    ] = None

    def check(self, rates: str | None, with_compare: bool) -> None:
        """Raises `ConfigError` for flags that contradict each other; `rates` is the value of `--rates`."""
        check_positive({"--rate": self.rate, "--duration-s": self.duration_s})
        if [self.rate, rates, self.concurrency].count(None) != 2:
            several = ", --rates (one after the other)" if with_compare else ""
            raise ConfigError(f"give either --rate (an open loop){several} or --concurrency (a closed one)")
        if self.concurrency is not None and self.arrivals is not None:
            raise ConfigError(
                f"--arrivals {self.arrivals} needs --rate: with --concurrency, an answer triggers the next request"
            )
        if self.requests is not None and self.duration_s is not None:
            raise ConfigError("give either --requests or --duration-s")

    @property
    def request_count(self) -> int | None:
        """The number of requests to send; None if `--duration-s` ends the load."""
        return self.requests or (_REQUESTS if self.duration_s is None else None)

    def arrivals_at(self, rate: float | None, seed: int) -> Arrivals | None:
        """Returns the arrival process of an open loop at `rate` requests a second; None for a closed loop."""
        from disagg.bench.serve.arrivals import Arrivals

        return None if rate is None else Arrivals(self.arrivals or "poisson", rate, self.burst_size, seed)


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """Flags for prompts and answers."""

    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens",
            metavar="SPEC",
            help="512, 128-1024, lognormal:MEAN,SIGMA[,MAX], or sharegpt-like (a lognormal model of ShareGPT).",
        ),
    ] = "512"
    output_tokens: Annotated[
        str,
        typer.Option(
            "--output-tokens",
            metavar="SPEC",
            help="Length of answers, in the notation of --input-tokens: a maximum, or exact with --ignore-eos.",
        ),
    ] = "128"
    shared_prefix_tokens: Annotated[
        int,
        typer.Option(
            "--shared-prefix-tokens", min=0, help="Tokens of a shared prefix before the input tokens."
        ),
    ] = 0
    shared_prefixes: Annotated[
        int, typer.Option("--shared-prefixes", min=1, help="Number of different shared prefixes.")
    ] = 1
    token_ids: Annotated[
        str,
        typer.Option(
            "--token-ids",
            metavar="LOW-HIGH",
            help="Range of random ids in prompts; every vocabulary has the default range.",
        ),
    ] = "32-255"
    ignore_eos: Annotated[
        bool,
        typer.Option("--ignore-eos", help="Every answer must have exactly its number of output tokens."),
    ] = False
    extra_body: Annotated[
        str | None,
        typer.Option(
            "--extra-body",
            metavar="JSON",
            help='Further fields of every request, e.g. \'{"structured_outputs": {"regex": "[a-z]+"}}\'.',
        ),
    ] = None
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of arrivals, lengths and prompts.")] = 0

    def settings(self, chat: bool) -> dict[str, str | float | bool | None]:
        """Returns the values that a report shows, without the seed."""
        return {
            "input_tokens": self.input_tokens,
            "output_tokens": self.output_tokens,
            "shared_prefix_tokens": self.shared_prefix_tokens,
            "shared_prefixes": self.shared_prefixes,
            "token_ids": None if chat else self.token_ids,
            "ignore_eos": self.ignore_eos,
            "extra_body": self.extra_body,
        }

    def workload(self, model: str, chat: bool, seed: int) -> Workload:
        """Returns the generator of a run's requests; a command with several runs has a `seed` for each of them.

        Raises `ConfigError` for malformed flags.
        """
        from disagg.bench.serve.lengths import parse_lengths
        from disagg.bench.serve.workload import Workload, parse_extra

        return Workload(
            model=model,
            chat=chat,
            input=parse_lengths("--input-tokens", self.input_tokens),
            output=parse_lengths("--output-tokens", self.output_tokens),
            prefix_tokens=self.shared_prefix_tokens,
            prefixes=self.shared_prefixes,
            token_ids=_token_ids(self.token_ids),
            ignore_eos=self.ignore_eos,
            seed=seed,
            extra=parse_extra("--extra-body", self.extra_body),
        )


@dataclass(frozen=True, kw_only=True)
class LimitFlags:
    """Flags for limits of an answer's latency."""

    slo_ttft_s: Annotated[
        float | None, typer.Option("--slo-ttft-s", help="Goodput: limit of the time to the first token.")
    ] = None
    slo_itl_s: Annotated[
        float | None,
        typer.Option("--slo-itl-s", help="Goodput: limit of an answer's mean inter-token latency."),
    ] = None
    timeout_s: Annotated[float, typer.Option("--timeout-s", help="Limit of one whole answer.")] = 600.0

    def check(self) -> None:
        """Raises `ConfigError` for a limit that is not positive."""
        check_positive(
            {
                "--timeout-s": self.timeout_s,
                "--slo-ttft-s": self.slo_ttft_s,
                "--slo-itl-s": self.slo_itl_s,
            }
        )


def check_positive(flags: dict[str, float | None]) -> None:
    """Raises a `ConfigError` that names the first flag whose value is neither None nor positive and finite."""
    for flag, value in flags.items():
        if value is not None and not 0 < value < float("inf"):
            raise ConfigError(f"{flag} {value:g}: give a number above 0")


def _token_ids(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or int(match[1]) > int(match[2]):
        raise ConfigError(f"--token-ids {text}: give the lowest and the highest id, as 32-255")
    return int(match[1]), int(match[2])
