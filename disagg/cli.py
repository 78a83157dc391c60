"""The command line. Commands live in `cli_*.py` and import what is heavy only when they run.

One error boundary: an error that we raise on purpose is one line on stderr and its class' exit code (2 for
the user's input), Ctrl-C is 130, anything else a traceback and 1.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import typer

from disagg import (
    cli_bench,
    cli_bench_agreement,
    cli_bench_overload,
    cli_bench_serve,
    cli_launch,
    cli_models,
    cli_run,
    cli_serve,
    cli_stats,
    cli_tools,
    cli_top,
)
from disagg.core.errors import DisaggError

app = typer.Typer(
    name="disagg",
    help="Disaggregated LLM serving: prefill on one group of ranks, move the KV cache, decode on another.",
    add_completion=False,
    # Plain help is instant; rich is imported by the commands that draw tables.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.command("demo")(cli_run.demo)
app.command("generate")(cli_run.generate)
app.command("serve")(cli_serve.serve)
app.command("launch")(cli_launch.launch)
app.command("scale")(cli_launch.scale)
app.command("top")(cli_top.top)
app.command("stats", cls=cli_stats.StatsCommand)(cli_stats.stats)
app.command("doctor")(cli_tools.doctor)
app.command("plan")(cli_tools.plan)
app.command("models")(cli_models.models)
app.command("keys")(cli_tools.keys)
app.command("version")(cli_tools.version)
cli_bench.app.command("agreement")(cli_bench_agreement.agreement)
cli_bench.app.command("serve")(cli_bench_serve.serve)
cli_bench.app.command("overload")(cli_bench_overload.overload)
app.add_typer(cli_bench.app, name="bench")

# What typer raises for a wrong command line. The class lives in click or in typer's own copy of it, depending
# on typer's version; `BadParameter`, its child, has a public name in both.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command (`sys.argv` when left out); returns the exit code and raises nothing."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = app(args=given or ["--help"], prog_name="disagg", standalone_mode=False)
        sys.stdout.flush()  # or a full disk would show after this boundary
    except typer.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = _INTERRUPTED
    except DisaggError as exc:
        print(f"disagg: {_one_line(str(exc))}", file=sys.stderr)
        return exc.exit_code
    except _UsageError as exc:
        print(f"disagg: {_usage(exc)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader (`| head`) has gone; without this the interpreter complains once more while it ends.
        sys.stderr.close()
        return 0
    except OSError as exc:
        if exc.errno not in _FULL:
            traceback.print_exc()
        else:
            where = f"{exc.filename}: " if exc.filename else ""
            print(f"disagg: cannot write: {where}{exc.strerror}; free some space", file=sys.stderr)
            _forget_output()
        return 1
    except Exception:  # noqa: BLE001 - the boundary: whatever was not foreseen is shown whole
        traceback.print_exc()
        return 1
    if code == _INTERRUPTED:  # newer typers make an exit code of it themselves
        print("disagg: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `disagg` script."""
    sys.exit(run())


def _forget_output() -> None:
    """Whatever stdout still holds goes nowhere; else the interpreter would fail once more while it ends."""
    with contextlib.suppress(OSError):
        sys.stdout.close()
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - lives until the process ends


def _usage(exc: Exception) -> str:
    context = getattr(exc, "ctx", None)
    message = exc.format_message() if hasattr(exc, "format_message") else str(exc)
    where = context.command_path if context is not None else "disagg"
    return _one_line(message).rstrip(".") + f" (see {where} --help)"


def _one_line(text: str) -> str:
    return " ".join(text.split())


if __name__ == "__main__":
    main()
