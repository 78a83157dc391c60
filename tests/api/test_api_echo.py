"""`echo` and `prompt_logprobs`: replies that contain the prompt and its log-probabilities, as OpenAI's and vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import ApiServer

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(max_prompts=4, max_n=4) as one:
        yield one


def lm_eval_scores(reply: dict[str, Any], context_tokens: list[int]) -> list[tuple[float, bool]]:
    """lm-eval's `LocalCompletionsAPI.parse_logprobs`: sum over the continuation, and whether it is the likeliest."""
    found = []
    choices = sorted(reply["choices"], key=lambda choice: choice["index"])
    for choice, start in zip(choices, context_tokens, strict=True):
        logprobs = choice["logprobs"]
        tokens, tops = logprobs["tokens"][start:-1], logprobs["top_logprobs"][start:-1]
        greedy = all(token == max(top, key=top.get) for token, top in zip(tokens, tops, strict=True))
        found.append((sum(logprobs["token_logprobs"][start:-1]), greedy))
    return found


def test_an_echo_begins_with_the_prompt(server: ApiServer) -> None:
    choice = server.ask(prompt="hi!", echo=True, max_tokens=2, logprobs=1).json()["choices"][0]
    assert choice == {
        "index": 0,
        "text": "hi!ab",
        "finish_reason": "length",
        "logprobs": {
            "tokens": ["h", "i", "!", "a", "b"],
            "token_logprobs": [None, -2.0, -3.0, -0.5, -0.5],
            "top_logprobs": [None, {"j": -0.5, "i": -2.0}, {'"': -0.5, "!": -3.0}, {"a": -0.5}, {"b": -0.5}],
            "text_offset": [0, 1, 2, 3, 4],
        },
    }


@pytest.mark.parametrize("logprobs", [None, 1])
def test_a_stream_begins_with_the_prompt(server: ApiServer, logprobs: int | None) -> None:
    fields: dict[str, Any] = {"prompt": "hi!", "echo": True, "max_tokens": 2, "logprobs": logprobs, "n": 2}
    whole = server.ask(**fields).json()["choices"]
    lines = server.ask(**fields, stream=True).text.split("\n\n")[:-2]
    chunks = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    for choice in whole:
        mine = [one for one in chunks if one["index"] == choice["index"]]
        assert "".join(one["text"] for one in mine) == choice["text"]
        if logprobs is not None:
            for name, values in choice["logprobs"].items():
                assert [value for one in mine for value in one["logprobs"][name]] == values


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_multiple_choice_of_lm_eval(server: ApiServer, max_tokens: int) -> None:
    """Prompts are token ids, several in a request; with `max_tokens=0` nothing follows the prompt."""
    prompts = [list(b"a question"), list(b"no")]
    fields = {"echo": True, "logprobs": 1, "max_tokens": max_tokens, "temperature": 0, "seed": 1234}
    reply = server.ask(prompt=prompts, **fields).json()
    assert [one["text"] for one in reply["choices"]] == [
        "a question" + "a" * max_tokens,
        "no" + "a" * max_tokens,
    ]
    assert reply["usage"]["completion_tokens"] == 2 * max_tokens
    assert {one["finish_reason"] for one in reply["choices"]} == {"length"}
    counts = [len(one["logprobs"]["token_logprobs"]) for one in reply["choices"]]
    assert counts == [len(prompt) + max_tokens for prompt in prompts]
    if max_tokens:
        assert lm_eval_scores(reply, [8, 1]) == [(-9.0 - 10.0, False), (-2.0, False)]


def test_an_echo_without_logprobs_computes_none(server: ApiServer) -> None:
    choices = server.ask(prompt=["x", "yz"], echo=True, max_tokens=1, best_of=2).json()["choices"]
    assert [one["text"][:-1] for one in choices] == ["x", "yz"]
    assert server.generator.calls[-1][2].prompt_logprobs is None


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_prompt_logprobs(server: ApiServer, path: str) -> None:
    fields: dict[str, Any] = {"prompt": "hij"} if path == COMPLETIONS else {}
    reply = server.ask(path, **fields, max_tokens=1, prompt_logprobs=1).json()
    found = (reply["choices"][0] if path == COMPLETIONS else reply)["prompt_logprobs"]
    text = "hij" if path == COMPLETIONS else "<user>hi<assistant>"
    assert found[0] is None
    assert len(found) == len(text)
    own = {"logprob": -3.0, "rank": 2, "decoded_token": text[2]}
    likeliest = chr(ord(text[2]) + 1)
    other = {"logprob": -0.5, "rank": 1, "decoded_token": likeliest}
    assert found[2] == {str(ord(text[2])): own, str(ord(likeliest)): other}
    assert "prompt_logprobs" not in server.ask(path, max_tokens=1).text


def test_only_one_answer_to_a_prompt_computes_them(server: ApiServer) -> None:
    """Where each answer is a request of its own."""
    before = len(server.generator.calls)
    choices = server.ask(prompt="hij", n=3, max_tokens=1, prompt_logprobs=0).json()["choices"]
    assert len({json.dumps(one["prompt_logprobs"]) for one in choices}) == 1
    assert choices[2]["prompt_logprobs"][1] == {"105": {"logprob": -2.0, "rank": 2, "decoded_token": "i"}}
    samplings = [sampling for _, _, sampling in server.generator.calls[before:]]
    assert [sampling.prompt_logprobs for sampling in samplings] == [0, None, None]
