"""The command line: registers the commands of this folder, which import heavy packages only when they run.

`run` is the only place that turns errors into exit codes. A `DisaggError` is printed as one line on stderr, with the
exit code of its class (2 for bad input). Ctrl-C exits with 130. Any other error prints a traceback and exits with 1.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from disagg.cli import launch as cli_launch
from disagg.cli import models as cli_models
from disagg.cli import profile as cli_profile
from disagg.cli import roll as cli_roll
from disagg.cli import run as cli_run
from disagg.cli import serve as cli_serve
from disagg.cli import stats as cli_stats
from disagg.cli import tools as cli_tools
from disagg.cli import top as cli_top
from disagg.cli import vllm_proxy as cli_vllm_proxy
from disagg.cli.bench import app as cli_bench
from disagg.cli.hints import advice, flags, flags_of_commands
from disagg.commands.signals import INTERRUPTED
from disagg.core.errors import DisaggError

app = typer.Typer(
    name="disagg",
    help="Disaggregated LLM serving: prefill on one group of ranks, move the KV cache, decode on another.",
    add_completion=False,
    # Plain help is instant; rich is imported by the commands that draw tables.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.callback()(cli_tools.common)
app.command("demo")(cli_run.demo)
app.command("generate")(cli_run.generate)
app.command("serve")(cli_serve.serve)
app.command("launch")(cli_launch.launch)
app.command("scale")(cli_launch.scale)
app.command("roll")(cli_roll.roll)
app.command("top")(cli_top.top)
app.command("stats", cls=cli_stats.StatsCommand)(cli_stats.stats)
app.command("profile")(cli_profile.profile)
app.command("doctor")(cli_tools.doctor)
app.command("plan")(cli_tools.plan)
app.command("models")(cli_models.models)
app.command("keys")(cli_tools.keys)
app.command("vllm-proxy")(cli_vllm_proxy.vllm_proxy)
app.command("version")(cli_tools.version)
app.add_typer(cli_bench.app, name="bench")

# Typer's error class for a wrong command line. Depending on typer's version, the class is in click or in typer's copy
# of click. Only its subclass `BadParameter` has a public name in typer.
_UsageError: type[Exception] = typer.BadParameter.__mro__[1]


_FULL = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk and of an exceeded quota."""


@functools.cache
def command_line() -> Any:
    """Returns the group of all commands, built at the first call: typer then reads the flags of all commands."""
    return typer.main.get_command(app)


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs one command, by default the one in `sys.argv`; returns the exit code and raises nothing."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        code = command_line()(args=words or ["--help"], prog_name="disagg", standalone_mode=False)
        sys.stdout.flush()  # so that the handlers below get the error of a full disk
    except typer.Exit as exc:
        return exc.exit_code
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except DisaggError as exc:
        print(f"disagg: {_one_line(str(exc))}", file=sys.stderr)
        return exc.exit_code
    except _UsageError as exc:
        print(f"disagg: {_usage(exc, words)}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of stdout (`| head`) has closed the pipe. With stderr open, the interpreter would report this
        # again at exit.
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
    except Exception:  # noqa: BLE001 - the boundary: an unforeseen error is shown with its traceback
        traceback.print_exc()
        return 1
    if code == INTERRUPTED:  # newer versions of typer return this code instead of raising `Abort`
        print("disagg: interrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0


def main() -> None:
    """Entry point of the `disagg` script."""
    code = run()
    if code == INTERRUPTED:
        _exit_at_once(code)
    gc.freeze()  # otherwise the collections at exit would visit all of torch and transformers: 2 s of a core
    sys.exit(code)


def _exit_at_once(code: int) -> None:
    """Ends the process without finalizers, in which a half-started Ray could crash or replace the exit code."""
    for child in multiprocessing.active_children():
        child.kill()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _forget_output() -> None:
    """Discards the buffered output: at exit the interpreter would flush it to the full disk, and fail again."""
    with contextlib.suppress(OSError):
        sys.stdout.close()
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115 - lives until the process ends


def _usage(exc: Exception, words: Sequence[str]) -> str:
    context = getattr(exc, "ctx", None)
    message = exc.format_message() if hasattr(exc, "format_message") else str(exc)
    where = context.command_path if context is not None else "disagg"
    flag = getattr(exc, "option_name", None)
    if flag is not None and hasattr(exc, "possibilities") and context is not None:
        if not flag.startswith("--"):  # for `-tp`, the parser reports only `-t`
            flag = next((word for word in words if word.startswith(flag)), flag)
        hint = advice(flag, flags(context.command), flags_of_commands(context.find_root().command))
        message = f"No such option: {flag}" + (f"; {hint}" if hint else "")
    return _one_line(message).rstrip(".") + f" (see {where} --help)"


def _one_line(text: str) -> str:
    return " ".join(text.split())
