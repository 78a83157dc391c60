"""deploy/submit.py: one job at a time, for all submitters together."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import pytest

from deploy import submit


@dataclass(frozen=True)
class FakeStatus:
    name: str

    def __str__(self) -> str:
        return self.name

    def is_terminal(self) -> bool:
        return self.name in {"SUCCEEDED", "FAILED", "STOPPED"}


@dataclass
class FakeJobs:
    """A cluster's job API: a job ends, with `ending`, when its output has been read."""

    ending: str = "SUCCEEDED"
    jobs: dict[str, str] = field(default_factory=dict)
    submitted: list[str] = field(default_factory=list)
    lost: bool = False

    def get_job_status(self, job_id: str) -> FakeStatus:
        if job_id not in self.jobs:
            raise RuntimeError(f"Request failed with status code 404: Job {job_id} does not exist")
        return FakeStatus(self.jobs[job_id])

    def delete_job(self, job_id: str) -> bool:
        assert self.get_job_status(job_id).is_terminal()
        return self.jobs.pop(job_id) != ""

    def submit_job(self, *, entrypoint: str, submission_id: str) -> str:
        assert submission_id not in self.jobs
        self.submitted.append(entrypoint)
        self.jobs[submission_id] = "RUNNING"
        return submission_id

    async def tail_job_logs(self, job_id: str) -> AsyncIterator[str]:
        yield "one\n"
        if self.lost:
            raise RuntimeError("WebSocket connection closed unexpectedly with close code 1006")
        yield "two\n"
        self.jobs[job_id] = self.ending


def run(jobs: FakeJobs) -> tuple[int, str]:
    lines: list[str] = []
    code = submit.run(jobs, "launch", ["disagg", "launch", "--config", "a b"], lines.append)
    return code, "".join(lines)


def test_a_job_is_submitted_and_followed() -> None:
    jobs = FakeJobs()
    assert run(jobs) == (0, "one\ntwo\n")
    assert jobs.submitted == ["disagg launch --config 'a b'"]


def test_a_job_that_runs_is_not_submitted_again() -> None:
    jobs = FakeJobs(jobs={"launch": "RUNNING"})
    assert run(jobs) == (0, "one\ntwo\n")
    assert jobs.submitted == []


@pytest.mark.parametrize("before", ["FAILED", "STOPPED", "SUCCEEDED"])
def test_a_job_that_has_ended_is_replaced(before: str) -> None:
    jobs = FakeJobs(jobs={"launch": before})
    assert run(jobs)[0] == 0
    assert len(jobs.submitted) == 1


@pytest.mark.parametrize("ending", ["FAILED", "STOPPED"])
def test_how_a_job_ended_is_the_exit_code(ending: str) -> None:
    assert run(FakeJobs(ending=ending))[0] == 1


def test_a_head_that_goes_away(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(FakeJobs(lost=True))[0] == 1
    assert "cannot be followed" in capsys.readouterr().err


def test_a_cluster_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(submit, "POLL_S", 0.0)
    jobs, tries = FakeJobs(), iter([ConnectionError("refused"), ConnectionError("refused"), None])

    def open_client() -> FakeJobs:
        if (error := next(tries)) is not None:
            raise error
        return jobs

    assert submit.connect(open_client, 60.0) is jobs


def test_a_cluster_that_never_answers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> FakeJobs:
        raise ConnectionError("refused")

    monkeypatch.setattr(submit, "open_client", refuse)
    monkeypatch.setattr(submit, "PATIENCE_S", 0.0)
    assert submit.main(["--job", "launch", "--", "true"]) == 1
    assert "no Ray cluster answers: refused; check RAY_API_SERVER_ADDRESS" in capsys.readouterr().err


def test_a_token_that_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def refuse() -> FakeJobs:
        raise PermissionError("the Ray cluster refuses this token; check RAY_AUTH_TOKEN")

    monkeypatch.setattr(submit, "open_client", refuse)
    assert submit.main(["--job", "launch", "--", "true"]) == 1
    assert "check RAY_AUTH_TOKEN" in capsys.readouterr().err
