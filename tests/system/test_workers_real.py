"""`disagg serve --workers 2` as a process: both workers answer, one is killed and comes back, a signal ends all."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from conditions import PATIENCE_S, until
from prometheus_client.parser import text_string_to_metric_families
from serve_process import API_KEY, ONE_RANK, PROMPT, Served, command, serve_process

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.reference.answers import reference_answers
from disagg.sockets.guards import WORKERS_FOLDER
from disagg.sockets.processes import process_kind

REQUESTS = 20
"""Each has its own connection. All of them reach the same one of two workers with a probability of 1 in 2^19."""
TOKENS = 4
END_S = 20.0


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("workers")
    with serve_process(folder, "--workers", "2", "--set", "api.max_queued=33", groups=ONE_RANK) as served:
        until(lambda: httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200)
        yield served


@pytest.fixture(scope="module")
def expected(served: Served) -> str:
    config = Config(model=ModelConfig(path=str(served.checkpoint)))
    greedy = SamplingParams(max_tokens=TOKENS)
    [answer] = reference_answers(config, [list(PROMPT.encode())], greedy, lambda: None).answers
    return bytes(answer).decode()


def ask(served: Served) -> str:
    """The text of an answer, over a new connection."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    headers = {"authorization": f"Bearer {API_KEY}"}
    reply = httpx.post(
        f"{served.url}/v1/completions", json=body, headers=headers, trust_env=False, timeout=PATIENCE_S
    )
    reply.raise_for_status()
    return str(reply.json()["choices"][0]["text"])


def totals(served: Served, series: str) -> dict[str, float]:
    """The values of a series by worker."""
    text = httpx.get(f"{served.url}/metrics", trust_env=False).text
    return {
        sample.labels["worker"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == series
    }


def workers(served: Served) -> list[psutil.Process]:
    """The processes of the workers, by number."""
    found = re.findall(
        r'"worker": (\d+), "process_id": (\d+), "event": "worker_serves"', served.log.read_text()
    )
    pids = {int(number): int(pid) for number, pid in found}
    return [psutil.Process(pids[number]) for number in sorted(pids)]


def test_both_workers_answer_and_any_of_them_reports_for_both(served: Served, expected: str) -> None:
    assert [ask(served) for _ in range(REQUESTS)] == [expected] * REQUESTS
    for _ in range(8):  # connections, to either worker
        requests = totals(served, "disagg_requests_total")
        assert sorted(requests) == ["0", "1"]
        assert sum(requests.values()) == REQUESTS
        assert sum(totals(served, "disagg_generated_tokens_total").values()) == REQUESTS * TOKENS
        headers = {"authorization": f"Bearer {API_KEY}"}
        status = httpx.get(f"{served.url}/status", headers=headers, trust_env=False).json()
        assert status["workers"] == 2
        assert status["generated_tokens_total"] == REQUESTS * TOKENS
        assert (status["max_running"], status["max_queued"]) == (32, 33), "the parts add up to the limits"
        assert len(status["recent"]) == REQUESTS
        assert [group["name"] for group in status["groups"]] == ["colocated"]


def test_the_sockets_of_workers_are_private(served: Served) -> None:
    found = {line["address"]: line for line in map(json.loads, lines(served)) if line["event"] == "listening"}
    private = [line for address, line in found.items() if WORKERS_FOLDER in address]
    assert [line["protection"] for line in private] == ["unix permissions"] * 2
    assert {line["purpose"] for line in private} == {"status of router workers"}


def test_a_port_in_use_is_refused_before_workers_start(served: Served, tmp_path: Path) -> None:
    port = served.url.rpartition(":")[2]
    arguments = ["serve", "--workers", "2", "--model", str(served.checkpoint), *ONE_RANK, "--port", port]
    with command(tmp_path, arguments) as other:
        assert other.process.wait(PATIENCE_S) == 2
        assert f"cannot listen on 127.0.0.1:{port}" in other.log.read_text()


def test_workers_import_no_torch(served: Served) -> None:
    """They get the tokenizer from their parent, which has read the model's configuration with torch."""
    parent, *others = (
        {Path(one.path).name for one in process.memory_maps()}
        for process in (psutil.Process(served.process.pid), *workers(served))
    )
    assert "libtorch_cpu.so" in parent
    assert len(others) == 2
    assert all("libtorch_cpu.so" not in other for other in others)


def test_a_killed_worker_comes_back_while_the_other_serves(served: Served, expected: str) -> None:
    before = workers(served)
    assert [process_kind(one.cmdline()) for one in before] == ["spawn_main"] * 2
    before[0].kill()
    until(lambda: "worker_ended" in served.log.read_text())
    assert [ask(served) for _ in range(8)] == [expected] * 8
    assert sorted(totals(served, "disagg_generated_tokens_total")) == ["1"]
    until(lambda: len(re.findall("worker_serves", served.log.read_text())) == 3)
    assert workers(served)[1].pid == before[1].pid
    until(lambda: sorted(totals(served, "disagg_generated_tokens_total")) == ["0", "1"])
    served_by_new = totals(served, "disagg_generated_tokens_total")["0"]
    for _ in range(REQUESTS):
        assert ask(served) == expected
    assert totals(served, "disagg_generated_tokens_total")["0"] > served_by_new


def test_a_signal_ends_all_workers(served: Served) -> None:
    """The last test of this file."""
    family, began_s = served.family(), time.monotonic()
    served.process.send_signal(signal.SIGTERM)
    assert served.process.wait(END_S) == 0, served.log.read_text()
    psutil.wait_procs(family, timeout=END_S)
    assert not [one for one in family if one.is_running()]
    assert time.monotonic() - began_s < END_S
    assert len(re.findall('"event": "stopping"', served.log.read_text())) == 2, "each worker has drained"


def lines(served: Served) -> list[str]:
    """The log's lines that are JSON."""
    return [line for line in served.log.read_text().splitlines() if line.startswith("{")]
