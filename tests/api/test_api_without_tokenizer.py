"""A model without a tokenizer: prompts and answers are token ids, and text is refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_server import ApiServer
from fake_generator import ANSWER

from disagg.commands.router_server import model_facts
from disagg.core.config.read import Config, ModelConfig
from disagg.model.load.source import ModelSource
from disagg.model.load.tiny import make_tiny_checkpoint
from disagg.model.load.tokenizer import has_tokenizer
from disagg.router.text import IdDecode, TextStream

CHAT = "/v1/chat/completions"
IDS = "".join(f" {token}" for token in ANSWER[:4])


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer(with_tokenizer=False) as server:
        yield server


def test_ids_are_answered_with_ids(server: ApiServer) -> None:
    reply = server.ask(prompt=[1, 2, 3], max_tokens=4)
    assert reply.status_code == 200
    assert reply.json()["choices"][0]["text"] == IDS
    assert reply.json()["usage"]["prompt_tokens"] == 3
    assert server.generator.calls[-1][1] == [1, 2, 3]


def test_a_stream_has_an_id_for_each_token(server: ApiServer) -> None:
    reply = server.ask(prompt=[[1], [2, 3]], max_tokens=4, stream=True)
    assert reply.text.count(f'"text":" {ANSWER[0]}"') == 2


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "hello"}, "prompt"),
        ("/v1/completions", {"prompt": ["hello", "you"]}, "prompt"),
        ("/v1/completions", {"prompt": [1], "stop": "x"}, "stop"),
        (CHAT, {}, "messages"),
        ("/v1/responses", {}, "input"),
    ],
)
def test_text_is_refused_with_the_reason(
    server: ApiServer, path: str, fields: dict[str, Any], param: str
) -> None:
    reply = server.ask(path, **fields)
    error = reply.json()["error"]
    assert (reply.status_code, error["code"], error["param"]) == (400, "no_tokenizer", param)
    for said in ("has no tokenizer", "list of token ids", "add the tokenizer's files"):
        assert said in error["message"]


def test_tokenize_is_refused(server: ApiServer) -> None:
    reply = server.client.post("/tokenize", json={"prompt": "hello"})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_tokenizer")


def test_ids_are_final_at_once() -> None:
    stream = TextStream(IdDecode())
    assert [stream.push([7, 8]), stream.push([9]), stream.push([], last=True)] == [" 7 8", " 9", ""]


def test_the_start_says_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_tiny_checkpoint(tmp_path / "model", layers=1)
    assert has_tokenizer(ModelSource.from_directory(folder))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    facts = model_facts(Config(model=ModelConfig(path=str(folder))))
    assert facts.tokenizer is None
    [line] = [line for line in capsys.readouterr().out.splitlines() if "no_tokenizer" in line]
    for said in (str(folder), "token ids", "tokenizer.json"):
        assert said in line
