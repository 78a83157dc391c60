"""Several answers to a prompt, the best of several, beam searches: requests to the engine, and replies."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from api_server import ApiServer

from disagg.core.sampling import derived_seed
from disagg.core.types import SamplingParams

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        running.generator.most = 4
        yield running


def samplings(server: ApiServer) -> list[SamplingParams]:
    return [sampling for _, _, sampling in server.generator.calls]


def test_answers_to_a_prompt_are_one_request_to_the_engine(server: ApiServer) -> None:
    reply = server.ask(prompt=["ab", "c"], n=3, seed=7, max_tokens=2).json()
    assert [(bytes(tokens), sampling.n) for _, tokens, sampling in server.generator.calls] == [
        (b"ab", 3),
        (b"c", 3),
    ]
    assert [sampling.seed for sampling in samplings(server)] == [7, 7], (
        "each answer's is derived where it is made"
    )
    assert [choice["text"] for choice in reply["choices"]] == ["ab", "bc", "cd"] * 2
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15}


def test_more_answers_than_a_group_computes_together_are_separate_requests(server: ApiServer) -> None:
    server.ask(n=5, seed=7, max_tokens=1)
    assert [s.n for s in samplings(server)] == [1] * 5
    assert [s.seed for s in samplings(server)] == [derived_seed(7, number) for number in range(5)]


def test_neither_are_those_together_that_the_pool_has_no_room_for(server: ApiServer) -> None:
    """Each by itself may be as long as it likes: one waits for another's pages."""
    server.generator.pool_tokens = 20
    reply = server.ask(prompt=["ab", "c" * 9], n=3, seed=7, max_tokens=4).json()
    assert [(len(tokens), sampling.n) for _, tokens, sampling in server.generator.calls] == [
        (2, 3),
        *[(9, 1)] * 3,
    ]
    assert [choice["index"] for choice in reply["choices"]] == list(range(6))
    assert len({sampling.seed for sampling in samplings(server)[1:]}) == 3
    refused = server.ask(prompt="c" * 9, use_beam_search=True, n=2, max_tokens=4)
    assert refused.status_code == 400


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_stream_of_several(server: ApiServer, path: str) -> None:
    texts = {0: "", 1: "", 2: ""}
    lines = server.ask(path, n=3, max_tokens=3, stream=True).text.split("\n\n")
    for line in [line for line in lines if line.startswith("data: {")]:
        for choice in json.loads(line.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice.get("text", "") or choice.get("delta", {}).get("content", "")
    assert texts == {0: "abc", 1: "bcd", 2: "cde"}
    assert len(server.generator.calls) == 1


@pytest.mark.parametrize("logprobs", [None, 1])
def test_the_best_of_several(server: ApiServer, logprobs: int | None) -> None:
    """Replies have the answers with the highest mean log-probability, and log-probabilities only if requested."""
    reply = server.ask(n=2, best_of=4, max_tokens=2, logprobs=logprobs).json()
    assert [choice["text"] for choice in reply["choices"]] == ["de", "ab"]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1]
    assert all((choice["logprobs"] is None) == (logprobs is None) for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 8, "all that were made"
    assert samplings(server)[0].logprobs == (logprobs or 0)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_beam_search(server: ApiServer, path: str) -> None:
    content = {
        "use_beam_search": True,
        "best_of": 4,
        "n": 2,
        "length_penalty": 0.5,
        "early_stopping": "never",
    }
    reply = server.ask(path, **content, max_tokens=2).json()
    assert len(reply["choices"]) == 2
    assert samplings(server) == [
        SamplingParams(max_tokens=2, n=2, beams=4, length_penalty=0.5, early_stopping="never")
    ]
    server.ask(path, use_beam_search=True, n=3, max_tokens=2)
    assert (samplings(server)[-1].n, samplings(server)[-1].beams) == (3, 3), "as many beams as answers"


def test_too_many_beams_are_refused_with_the_limit(server: ApiServer) -> None:
    reply = server.ask(use_beam_search=True, best_of=8, max_tokens=2)
    assert reply.status_code == 400
    assert "limit of 4 beams" in reply.json()["error"]["message"]


def test_one_failure_ends_all_answers_of_the_request(server: ApiServer) -> None:
    server.generator.error = RuntimeError("broken")
    server.generator.fail_after = 1
    reply = server.ask(prompt=["a", "b"], n=2, max_tokens=3)
    assert reply.status_code == 500
    server.generator.error = None
    assert server.ask(n=2, max_tokens=1).status_code == 200
    assert server.value("disagg_requests_running") == 0
