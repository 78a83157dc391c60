"""`disagg bench chaos`: flags for `disagg.bench.chaos.bench`, and its output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from disagg.cli.bench.common import OutputFlags, Shown, progress_lines, show
from disagg.cli.bench.load import check_positive
from disagg.cli.flags import ClusterFlags, JoinFlag, Sets
from disagg.cli.options import flag_values, with_options
from disagg.cli.settings import configuration
from disagg.commands.early import check_model
from disagg.core.errors import ConfigError

if TYPE_CHECKING:
    from disagg.bench.chaos.network import Network
    from disagg.bench.chaos.run import ChaosBench
    from disagg.bench.chaos.schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class FaultFlags:
    """Flags for the kinds and times of faults, and for the time that the system has to recover."""

    faults: Annotated[
        str,
        typer.Option(
            "--faults",
            metavar="KIND,...",
            help="kill (SIGKILL), stop (SIGSTOP, SIGCONT after --stop-s), hang (SIGSTOP without SIGCONT), cut (no "
            "network for --cut-s, see --cut-command).",
        ),
    ] = "kill"
    roles: Annotated[
        str,
        typer.Option(
            "--roles", metavar="ROLE,...", help="Roles of the groups whose ranks may be killed or stopped."
        ),
    ] = "prefill,decode,colocated"
    count: Annotated[int, typer.Option("--count", min=0, help="Number of faults.")] = 10
    duration_s: Annotated[
        float | None, typer.Option("--duration-s", help="Inject no fault after this time.")
    ] = None
    gap_s: Annotated[
        float, typer.Option("--gap-s", help="Mean delay before a fault, once all groups serve.")
    ] = 2.0
    stop_s: Annotated[
        str,
        typer.Option(
            "--stop-s", metavar="S,...", help="Durations between SIGSTOP and SIGCONT, one chosen at random."
        ),
    ] = "1,15"
    cut_s: Annotated[
        str,
        typer.Option("--cut-s", metavar="S,...", help="Durations of a cut, one chosen at random."),
    ] = "1,15"
    cut_command: Annotated[
        str | None,
        typer.Option(
            "--cut-command",
            metavar="COMMAND",
            help="Command that cuts the network, called with one more argument: both, forth or back (one "
            "direction), and mend after --cut-s.",
        ),
    ] = None
    overlap: Annotated[
        bool, typer.Option("--overlap", help="Inject a fault even if not all groups serve again.")
    ] = False
    recover_s: Annotated[
        float,
        typer.Option(
            "--recover-s",
            help="Time limit until all groups serve again. A rank that still hangs is then killed.",
        ),
    ] = 120.0
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of faults, prompts and sampling.")] = 0

    def schedule(self) -> Schedule:
        """Returns the schedule of faults. Raises `ConfigError` for values that are malformed or not positive."""
        from disagg.bench.chaos.schedule import FAULT_KINDS, ROLES, Schedule, parse_seconds
        from disagg.bench.common.names import parse_names

        check_positive(
            {"--duration-s": self.duration_s, "--gap-s": self.gap_s, "--recover-s": self.recover_s}
        )
        return Schedule(
            kinds=parse_names("--faults", self.faults, FAULT_KINDS),
            roles=parse_names("--roles", self.roles, ROLES),
            count=self.count,
            gap_s=self.gap_s,
            stops_s=parse_seconds("--stop-s", self.stop_s),
            cuts_s=parse_seconds("--cut-s", self.cut_s),
            seed=self.seed,
        )

    def network(self, schedule: Schedule) -> Network | None:
        """Returns the network to cut, if the schedule has cuts. Raises `ConfigError` for flags that do not match."""
        from disagg.bench.chaos.network import CutCommand

        if "cut" not in schedule.kinds:
            if self.cut_command is not None:
                raise ConfigError(f"--cut-command and --faults {self.faults}: add cut to --faults")
            return None
        if self.cut_command is None:
            raise ConfigError(f"--faults {self.faults}: a cut needs --cut-command, which cuts the network")
        if self.overlap:
            raise ConfigError(f"--faults {self.faults} and --overlap: the network has one cut at a time")
        try:
            return CutCommand(self.cut_command)
        except ValueError as exc:
            raise ConfigError(f"--cut-command {self.cut_command}: {exc}") from exc


@dataclass(frozen=True, kw_only=True)
class ChaosOptions:
    """Flags of `disagg bench chaos`."""

    cluster: ClusterFlags
    prefill_groups: Annotated[
        int, typer.Option("--prefill-groups", min=1, help="Prefill groups."), Sets(("prefill.groups",))
    ] = 2
    decode_groups: Annotated[
        int, typer.Option("--decode-groups", min=1, help="Decode groups."), Sets(("decode.groups",))
    ] = 2
    streams: Annotated[int, typer.Option("--streams", min=1, help="Number of requests in flight.")] = 10
    requests: Annotated[
        int,
        typer.Option("--requests", min=1, help="Number of different requests, which are sent repeatedly."),
    ] = 32
    input_tokens: Annotated[
        str,
        typer.Option(
            "--input-tokens", metavar="SPEC", help="Length of prompts, as for `disagg bench serve`."
        ),
    ] = "16-256"
    output_tokens: Annotated[
        str,
        typer.Option(
            "--output-tokens",
            metavar="SPEC",
            help="Maximum length of answers, in the notation of --input-tokens.",
        ),
    ] = "64-256"
    faults: FaultFlags
    join: JoinFlag = None
    output: OutputFlags


@with_options(ChaosOptions)
def chaos(options: ChaosOptions) -> None:
    """Kill and stop ranks, cut a network, under load; compare every answer with the answer of a run without faults.

    Exit code 1 if an answer failed or differs, or if the groups did not recover. The deterministic mode is on by
    default; with --no-deterministic, rounding can change tokens.
    """
    schedule = options.faults.schedule()
    network = options.faults.network(schedule)
    config = configuration(options.cluster.source, options)
    check_model(config.model)
    _check_join(options)
    from disagg.bench.chaos.bench import chaos_config, run_bench, run_joined_bench
    from disagg.bench.chaos.chart import write_chaos_chart
    from disagg.bench.chaos.report import chaos_json, figure_lines, figures_table

    bench = _bench(options, schedule, network)
    settings, report_line = _settings(options), progress_lines()
    if options.join is not None:
        report = run_joined_bench(config, options.join, bench, settings, report_line)
    else:
        config = chaos_config(config, options.cluster.deterministic, schedule.count)
        report = run_bench(config, bench, settings, report_line)
    shown = Shown(
        lambda: chaos_json(report),
        lambda: figures_table(report),
        figure_lines(report),
        lambda path: write_chaos_chart(path, report),
    )
    show("chaos", shown, options.output)
    if not report.passed:
        raise typer.Exit(1)


def _check_join(options: ChaosOptions) -> None:
    """Raises `ConfigError` if `--join` comes with flags for groups: `disagg launch` has already started these."""
    if options.join is None:
        return
    for one in flag_values(options):
        if not one.is_default and any(isinstance(item, Sets) for item in one.metadata):
            raise ConfigError(
                f"{one.flag} and --join: `disagg launch` has started the groups, omit {one.flag}"
            )


def _bench(options: ChaosOptions, schedule: Schedule, network: Network | None) -> ChaosBench:
    from disagg.bench.chaos.run import ChaosBench
    from disagg.bench.chaos.workload import make_requests
    from disagg.bench.serve.lengths import parse_lengths

    prompts = parse_lengths("--input-tokens", options.input_tokens)
    answers = parse_lengths("--output-tokens", options.output_tokens)
    return ChaosBench(
        schedule=schedule,
        requests=make_requests(options.requests, prompts, answers, options.faults.seed),
        streams=options.streams,
        overlap=options.faults.overlap,
        duration_s=options.faults.duration_s,
        recover_s=options.faults.recover_s,
        network=network,
    )


def _settings(options: ChaosOptions) -> dict[str, str | float | None]:
    """Returns the values of the flags that the report shows, by the flag's name."""
    faults = options.faults
    return {
        "streams": options.streams,
        "requests": options.requests,
        "input_tokens": options.input_tokens,
        "output_tokens": options.output_tokens,
        "faults": faults.faults,
        "roles": faults.roles,
        "count": faults.count,
        "duration_s": faults.duration_s,
        "gap_s": faults.gap_s,
        "stop_s": faults.stop_s,
        "cut_s": faults.cut_s,
        "overlap": faults.overlap,
        "recover_s": faults.recover_s,
        "seed": faults.seed,
    }
