"""Runs a command as a job of a Ray cluster and follows the job until it ends.

    RAY_API_SERVER_ADDRESS=http://HEAD:8265 RAY_AUTH_MODE=token python -m deploy.submit --job NAME -- COMMAND...

A restart of this process is safe: if a job of the same name is running, the process follows this job and submits no
second one. The exit code is 0 if the job succeeded; 1 if it failed, was stopped, or the cluster is unreachable.
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
"""Longest wait for the first reply of the cluster, whose image may still be loading."""
POLL_S = 2.0


class Status(Protocol):
    """The part of Ray's `JobStatus` that this module uses."""

    def is_terminal(self) -> bool:
        """Returns whether the job has ended."""


class Jobs(Protocol):
    """The part of Ray's `JobSubmissionClient` that this module uses. Raises `RuntimeError` for an unknown job."""

    def get_job_status(self, job_id: str) -> Status:
        """Returns the job's status."""

    def delete_job(self, job_id: str) -> bool:
        """Deletes an ended job, which frees its name."""

    def submit_job(self, *, entrypoint: str, submission_id: str) -> str:
        """Starts the command `entrypoint` on the head node, as a job named `submission_id`."""

    def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        """Yields the job's output until the job or the connection ends."""


def run(
    jobs: Jobs, name: str, command: Sequence[str], write: Callable[[str], object] = sys.stdout.write
) -> int:
    """Submits `command` as job `name` unless that job is running, streams its output, and returns the exit code."""
    try:
        _submit_unless_running(jobs, name, command)
        asyncio.run(_follow(jobs, name, write))
        while not (status := jobs.get_job_status(name)).is_terminal():
            time.sleep(POLL_S)
    except (RuntimeError, OSError) as exc:  # the two errors of Ray's client
        print(f"job {name} cannot be followed: {exc}", file=sys.stderr)
        return 1
    print(f"job {name} has ended: {status}", file=sys.stderr)
    return 0 if str(status) == "SUCCEEDED" else 1


def connect(opener: Callable[[], Jobs], patience_s: float) -> Jobs:
    """Returns a client once the cluster answers. Raises `ConnectionError` if it has not answered by `patience_s`."""
    until_s = time.monotonic() + patience_s
    while True:
        try:
            return opener()
        except ConnectionError:
            if time.monotonic() >= until_s:
                raise
            time.sleep(POLL_S)


def _submit_unless_running(jobs: Jobs, name: str, command: Sequence[str]) -> None:
    try:
        status = jobs.get_job_status(name)
    except RuntimeError:
        pass  # an unknown job: never submitted to this cluster
    else:
        if not status.is_terminal():
            print(f"job {name} runs already: following it", file=sys.stderr)
            return
        jobs.delete_job(name)
    jobs.submit_job(entrypoint=shlex.join(command), submission_id=name)


async def _follow(jobs: Jobs, name: str, write: Callable[[str], object]) -> None:
    async for text in jobs.tail_job_logs(name):
        write(text)


def open_client() -> Any:
    from ray.exceptions import AuthenticationError
    from ray.job_submission import JobSubmissionClient

    try:
        return JobSubmissionClient()  # address and token come from the environment
    except AuthenticationError as exc:
        raise PermissionError("the Ray cluster refuses this token; check RAY_AUTH_TOKEN") from exc


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.submit", description="Runs a command as a Ray job."
    )
    parser.add_argument("--job", required=True, metavar="NAME", help="the job's name, unique in its cluster")
    parser.add_argument("command", nargs="+", help="the command, after --")
    given = parser.parse_args(arguments)
    try:
        jobs = connect(open_client, PATIENCE_S)
    except ConnectionError as exc:
        print(f"no Ray cluster answers: {exc}; check RAY_API_SERVER_ADDRESS", file=sys.stderr)
        return 1
    except (RuntimeError, PermissionError) as exc:
        print(exc, file=sys.stderr)
        return 1
    return run(jobs, given.job, given.command)


if __name__ == "__main__":
    sys.exit(main())
