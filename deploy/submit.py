"""Runs a command as a job of a Ray cluster and stays with it until it ends.

    RAY_API_SERVER_ADDRESS=http://HEAD:8265 RAY_AUTH_MODE=token python -m deploy.submit --job NAME -- COMMAND...

Whoever runs this may be replaced: where a job of that name runs already, it is followed, not submitted a second time.
The exit code is 0 when the job succeeded, 1 when it failed or was stopped, or when the cluster is gone.
"""

from __future__ import annotations

import argparse
import asyncio
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, Protocol

PATIENCE_S = 600.0
"""How long a cluster that does not answer yet is waited for: its image may still be on the way."""
POLL_S = 2.0


class Status(Protocol):
    """Ray's `JobStatus`, as far as it is used here."""

    def is_terminal(self) -> bool:
        """True when the job has ended."""


class Jobs(Protocol):
    """Ray's `JobSubmissionClient`, as far as it is used here. Raises `RuntimeError` for a job it does not know."""

    def get_job_status(self, job_id: str) -> Status:
        """How the job is."""

    def delete_job(self, job_id: str) -> bool:
        """Forgets a job that has ended, so that its name is free."""

    def submit_job(self, *, entrypoint: str, submission_id: str) -> str:
        """Starts a command on the head."""

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """The job's output, until it ends or the connection does."""


def run(
    jobs: Jobs, name: str, command: Sequence[str], write: Callable[[str], object] = sys.stdout.write
) -> int:
    """Submits `command` as job `name` unless it runs, writes its output as it comes, and returns the exit code."""
    try:
        _submit_unless_running(jobs, name, command)
        asyncio.run(_follow(jobs, name, write))
        while not (status := jobs.get_job_status(name)).is_terminal():
            time.sleep(POLL_S)
    except (RuntimeError, OSError) as exc:  # Ray's client raises these two, whatever is wrong
        print(f"job {name} cannot be followed: {exc}", file=sys.stderr)
        return 1
    print(f"job {name} has ended: {status}", file=sys.stderr)
    return 0 if str(status) == "SUCCEEDED" else 1


def connect(open_client: Callable[[], Jobs], patience_s: float) -> Jobs:
    """A client of a cluster that answers. Raises `ConnectionError` when it has not within `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return open_client()
        except ConnectionError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(POLL_S)


def _submit_unless_running(jobs: Jobs, name: str, command: Sequence[str]) -> None:
    try:
        status = jobs.get_job_status(name)
    except RuntimeError:
        pass  # not known: never submitted to this cluster
    else:
        if not status.is_terminal():
            print(f"job {name} runs already: following it", file=sys.stderr)
            return
        jobs.delete_job(name)
    jobs.submit_job(entrypoint=shlex.join(command), submission_id=name)


async def _follow(jobs: Jobs, name: str, write: Callable[[str], object]) -> None:
    async for text in jobs.tail_job_logs(name):
        write(text)


def _open_client() -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient()  # address and token come from the environment
    except AuthenticationError as exc:
        raise PermissionError("the Ray cluster refuses this token; check RAY_AUTH_TOKEN") from exc


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.submit", description="Runs a command as a Ray job."
    )
    parser.add_argument(
        "--job", required=True, metavar="NAME", help="the job's name, one of a kind in its cluster"
    )
    parser.add_argument("command", nargs="+", help="behind --")
    given = parser.parse_args(arguments)
    try:
        jobs = connect(_open_client, PATIENCE_S)
    except ConnectionError as exc:
        print(f"no Ray cluster answers: {exc}; check RAY_API_SERVER_ADDRESS", file=sys.stderr)
        return 1
    except (RuntimeError, PermissionError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return run(jobs, given.job, given.command)


if __name__ == "__main__":
    sys.exit(main())
