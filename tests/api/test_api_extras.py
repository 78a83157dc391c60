"""Fields beyond OpenAI's: token ids, running counts, cached tokens, special tokens in the text, the version."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from api_server import ApiServer

from disagg import __version__
from disagg.model.load.tiny import EOS_ID

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def events(server: ApiServer, path: str, **fields: Any) -> list[Any]:
    reply = server.ask(path, stream=True, **fields)
    assert reply.status_code == 200, reply.text
    return [json.loads(one.removeprefix("data: ")) for one in reply.text.split("\n\n")[:-2]]


def test_the_version(server: ApiServer) -> None:
    assert server.client.get("/version").json() == {"version": __version__}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_token_ids(server: ApiServer, path: str) -> None:
    prompt = list(b"hi" if path == COMPLETIONS else b"<user>hi<assistant>")
    whole = server.ask(path, max_tokens=3, n=2, return_token_ids=True).json()
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(b"abc")] * 2
    [choice, _] = whole["choices"]
    assert (choice if path == COMPLETIONS else whole)["prompt_token_ids"] == prompt
    chunks = events(server, path, max_tokens=3, return_token_ids=True)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for one in choices for token in one.get("token_ids", [])] == list(b"abc")
    holders = choices if path == COMPLETIONS else chunks
    assert [one["prompt_token_ids"] for one in holders if "prompt_token_ids" in one] == [prompt]
    assert "token_ids" not in server.ask(path, max_tokens=3).text


def test_token_ids_of_several_prompts(server: ApiServer) -> None:
    choices = server.ask(prompt=["a", "bc"], n=2, max_tokens=1, return_token_ids=True).json()["choices"]
    assert [choice["prompt_token_ids"] for choice in choices] == [[97], [97], [98, 99], [98, 99]]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_priority_reaches_the_router(server: ApiServer, path: str) -> None:
    server.ask(path, max_tokens=1, priority=-7)
    server.ask(path, max_tokens=1)
    assert server.generator.priorities[-2:] == [-7, 0]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_counts_in_each_chunk(server: ApiServer, path: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(server, path, max_tokens=3, stream_options=options)
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert set(counts) == {1, 2, 3}
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {chunks[-1]["usage"]["prompt_tokens"]}
    reply = server.ask(path, stream=True, stream_options={"continuous_usage_stats": True})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_cached_tokens_count_once_for_each_prompt(server: ApiServer, path: str) -> None:
    usage = server.ask(path, max_tokens=2, n=2).json()["usage"]
    assert "prompt_tokens_details" not in usage, "the generator does not know"
    server.set(cached_tokens=1)
    usage = server.ask(path, max_tokens=2, n=2).json()["usage"]
    last = events(server, path, max_tokens=2, stream_options={"include_usage": True})[-1]["usage"]
    server.set(cached_tokens=None)
    assert usage["prompt_tokens_details"] == last["prompt_tokens_details"] == {"cached_tokens": 1}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_special_tokens_in_the_text(server: ApiServer, path: str) -> None:
    server.set(answer=[97, EOS_ID, 98])
    shown = server.ask(path, skip_special_tokens=False, max_tokens=9).json()["choices"][0]
    hidden = server.ask(path, max_tokens=9).json()["choices"][0]
    server.set(answer=None)
    for choice, text in ((shown, "a<|eos|>b"), (hidden, "ab")):
        assert (choice["text"] if path == COMPLETIONS else choice["message"]["content"]) == text
