"""What each route answers when all is well; streams byte by byte."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from api_server import CONTEXT_TOKENS, ApiServer, body
from conditions import until
from prometheus_client.parser import text_string_to_metric_families

from disagg.core.errors import DisaggError
from disagg.core.sampling import derived_seed

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def server() -> Iterator[ApiServer]:
    with ApiServer() as running:
        yield running


def fixed(text: str) -> str:
    """Ids and times are what differs between two runs."""
    text = re.sub(r'"id":"(cmpl|chatcmpl)-[0-9a-f]{32}"', r'"id":"\1-ID"', text)
    return re.sub(r'"created":\d+', '"created":0', text)


def events(text: str) -> list[Any]:
    parts = text.split("\n\n")
    assert parts.pop() == "", "each event ends with an empty line"
    assert parts.pop() == "data: [DONE]"
    return [json.loads(part.removeprefix("data: ")) for part in parts]


def test_a_completion(server: ApiServer) -> None:
    reply = server.ask(max_tokens=3)
    assert reply.status_code == 200
    assert fixed(reply.text) == (
        '{"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny","choices":[{"index":0,"text":"abc",'
        '"logprobs":null,"finish_reason":"length"}],"usage":{"prompt_tokens":2,"completion_tokens":3,"total_tokens":5}}'
    )
    request_id, prompt, sampling = server.generator.calls[-1]
    assert prompt == list(b"hi")
    assert sampling.temperature == 1.0, "OpenAI's default"
    assert request_id == reply.json()["id"] + "-0"


def test_a_completion_has_16_tokens_by_default(server: ApiServer) -> None:
    assert server.ask().json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("ab", [b"ab"]),
        (["ab", "c"], [b"ab", b"c"]),
        ([97, 98], [b"ab"]),
        ([[97, 98], [99]], [b"ab", b"c"]),
    ],
)
def test_every_form_of_a_prompt(server: ApiServer, prompt: Any, prompts: list[bytes]) -> None:
    reply = server.ask(prompt=prompt, max_tokens=1, n=2).json()
    content = [bytes(tokens) for _, tokens, _ in server.generator.calls[-2 * len(prompts) :]]
    assert sorted(content) == sorted(prompts * 2)
    assert [choice["index"] for choice in reply["choices"]] == list(range(2 * len(prompts)))
    assert reply["usage"]["prompt_tokens"] == sum(map(len, prompts)), "each prompt counts once"
    assert reply["usage"]["completion_tokens"] == 2 * len(prompts)


def test_each_of_n_has_a_seed_of_its_own(server: ApiServer) -> None:
    server.ask(prompt=["a", "b"], n=3, seed=7, max_tokens=1)
    calls = sorted(server.generator.calls[-6:], key=lambda call: int(call[0].rsplit("-", 1)[1]))
    seeds = [sampling.seed for _, _, sampling in calls]
    assert seeds[:3] == seeds[3:], "a prompt's answers do not depend on its neighbours"
    assert seeds[0] == 7, "the first is the one that n = 1 gives"
    assert seeds[:3] == [derived_seed(7, i) for i in range(3)]
    assert len(set(seeds)) == 3
    server.ask(n=2, max_tokens=1)
    assert [sampling.seed for _, _, sampling in server.generator.calls[-2:]] == [None, None]


def test_every_field_reaches_the_sampler(server: ApiServer) -> None:
    same = {
        "max_tokens": 9,
        "temperature": 0.5,
        "top_k": 4,
        "top_p": 0.9,
        "min_p": 0.1,
        "min_tokens": 2,
        "ignore_eos": True,
        "seed": -5,
        "logprobs": 2,
        "prompt_logprobs": 3,
        "presence_penalty": 0.25,
        "frequency_penalty": -0.25,
        "repetition_penalty": 1.5,
    }
    server.ask(
        **same, stop=["xx", "yy"], stop_token_ids=[65], logit_bias={"66": -3.5}, user="me", cache_salt="a"
    )
    assert server.generator.salts[-1] == "a"
    sampling = server.generator.calls[-1][2]
    assert {name: getattr(sampling, name) for name in sampling.__struct_fields__} == {
        **same,
        "stop": ("xx", "yy"),
        "stop_token_ids": (65,),
        "logit_bias": ((66, -3.5),),
        "grammar": "",  # contradicts ignore_eos and min_tokens
        "n": 1,
        "beams": 0,
        "length_penalty": 1.0,
        "early_stopping": False,
    }


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_session_is_named_by_field_or_header(server: ApiServer, path: str) -> None:
    """OpenAI's field comes first; without either there is none."""
    header = {"x-session-id": "chat-1"}
    for fields, headers in (
        ({"prompt_cache_key": "a b"}, header),
        ({}, header),
        ({"prompt_cache_key": None}, {}),
    ):
        content = body(path, max_tokens=1, **fields)
        assert server.client.post(path, json=content, headers=headers).status_code == 200
    assert server.generator.sessions[-3:] == ["a b", "chat-1", ""]


def test_a_stop_string_ends_an_answer(server: ApiServer) -> None:
    choice = server.ask(stop="de", max_tokens=20).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")


def test_what_means_off_is_accepted(server: ApiServer) -> None:
    off = {"best_of": 1, "echo": False, "suffix": "", "tools": [], "stop": [], "seed": None, "top_k": -1}
    assert server.ask(**off, response_format={"type": "text"}).status_code == 200
    chat = {"tool_choice": "none", "functions": [], "modalities": ["text"], "store": False, "audio": None}
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [
        {"role": "developer", "content": parts},
        {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
        {"role": "user", "content": "x", "name": "ann"},
    ]
    assert server.ask(CHAT, **chat, messages=messages, max_tokens=1).status_code == 200
    assert bytes(server.generator.calls[-1][1]) == b"<system>one\ntwo<assistant><user>x<assistant>"


def test_a_chat_answer(server: ApiServer) -> None:
    reply = server.ask(CHAT, max_completion_tokens=2)
    assert fixed(reply.text) == (
        '{"id":"chatcmpl-ID","object":"chat.completion","created":0,"model":"tiny","choices":[{"index":0,"message":'
        '{"content":"ab","role":"assistant","refusal":null},"logprobs":null,"finish_reason":"length"}],"usage":'
        '{"prompt_tokens":19,"completion_tokens":2,"total_tokens":21}}'
    )
    assert bytes(server.generator.calls[-1][1]) == b"<user>hi<assistant>"


def test_a_chat_answer_may_fill_the_context(server: ApiServer) -> None:
    assert server.ask(CHAT).json()["usage"]["total_tokens"] == CONTEXT_TOKENS


def test_a_streamed_completion_byte_by_byte(server: ApiServer) -> None:
    reply = server.ask(max_tokens=2, stream=True)
    head = 'data: {"id":"cmpl-ID","object":"text_completion","created":0,"model":"tiny","choices":['
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert fixed(reply.text) == "\n\n".join(
        [
            head + '{"index":0,"text":"a","logprobs":null,"finish_reason":null}]}',
            head + '{"index":0,"text":"b","logprobs":null,"finish_reason":"length"}]}',
            "data: [DONE]",
            "",
        ]
    )


def test_a_streamed_chat_byte_by_byte(server: ApiServer) -> None:
    reply = server.ask(CHAT, max_tokens=2, stream=True, stream_options={"include_usage": True})
    head = 'data: {"id":"chatcmpl-ID","object":"chat.completion.chunk","created":0,"model":"tiny","choices":['
    end = '"logprobs":null,"finish_reason":null}],"usage":null}'
    assert fixed(reply.text) == "\n\n".join(
        [
            head + '{"index":0,"delta":{"role":"assistant","content":""},' + end,
            head + '{"index":0,"delta":{"content":"a"},' + end,
            head + '{"index":0,"delta":{"content":"b"},' + end,
            head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}',
            head + '],"usage":{"prompt_tokens":19,"completion_tokens":2,"total_tokens":21}}',
            "data: [DONE]",
            "",
        ]
    )


def test_a_stream_of_several_choices_keeps_each_in_order(server: ApiServer) -> None:
    reply = server.ask(CHAT, max_tokens=3, n=2, stream=True)
    choices = [event["choices"][0] for event in events(reply.text)]
    for index in (0, 1):
        mine = [choice for choice in choices if choice["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(choice["delta"].get("content", "") for choice in mine) == "abc"
        assert [choice["finish_reason"] for choice in mine] == [None, None, None, None, "length"]


def test_nothing_is_sent_for_a_token_without_text(server: ApiServer) -> None:
    """Text that may begin a stop string is held back: the stream says nothing until it is certain."""
    reply = server.ask(stop=["abcz"], max_tokens=4, stream=True)
    assert [event["choices"][0]["text"] for event in events(reply.text)] == ["abcd"]


def test_logprobs_of_a_completion(server: ApiServer) -> None:
    want = {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"b": -0.5, "c": -1.5}],
        "text_offset": [0, 1],
    }
    assert server.ask(max_tokens=2, logprobs=2).json()["choices"][0]["logprobs"] == want
    streamed = events(server.ask(max_tokens=2, logprobs=2, stream=True).text)
    got = [event["choices"][0]["logprobs"] for event in streamed]
    assert {name: got[0][name] + got[1][name] for name in want} == want


def test_tokens_of_logprobs_by_their_numbers(server: ApiServer) -> None:
    """As vLLM names them: texts of two tokens may be the same."""
    content = {"max_tokens": 2, "logprobs": 1, "return_tokens_as_token_ids": True}
    found = server.ask(**content).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["token_id:97", "token_id:98"]
    assert found["top_logprobs"] == [{"token_id:97": -0.5}, {"token_id:98": -0.5}]
    assert found["text_offset"] == [0, 1]


def test_logprobs_of_a_chat(server: ApiServer) -> None:
    want = [
        {
            "token": text,
            "logprob": -0.5,
            "bytes": [ord(text)],
            "top_logprobs": [{"token": text, "logprob": -0.5, "bytes": [ord(text)]}],
        }
        for text in "ab"
    ]
    content = {"max_tokens": 2, "logprobs": True, "top_logprobs": 1}
    whole = server.ask(CHAT, **content).json()
    assert whole["choices"][0]["logprobs"] == {"content": want, "refusal": None}
    streamed = events(server.ask(CHAT, **content, stream=True).text)
    parts = [event["choices"][0]["logprobs"] for event in streamed]
    assert [part and part["content"] for part in parts] == [None, want[:1], want[1:], None]
    none = server.ask(CHAT, max_tokens=1, logprobs=True).json()["choices"][0]["logprobs"]["content"]
    assert none[0]["top_logprobs"] == []


def test_the_bytes_of_a_partial_character(server: ApiServer) -> None:
    assert server.model.token_bytes(0xC3) == b"\xc3"
    assert server.model.token_bytes(ord("x")) == b"x"


def test_models(server: ApiServer) -> None:
    card = {
        "id": "tiny",
        "object": "model",
        "created": server.model.created_s,
        "owned_by": "disagg",
        "max_model_len": CONTEXT_TOKENS,
    }
    assert server.client.get("/v1/models").json() == {"object": "list", "data": [card]}
    assert server.client.get("/v1/models/tiny").json() == card


def test_tokenize_and_detokenize(server: ApiServer) -> None:
    reply = server.client.post("/tokenize", json={"prompt": "h\u00e9"}).json()
    assert reply == {"count": 3, "max_model_len": CONTEXT_TOKENS, "tokens": list("h\u00e9".encode())}
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "add_generation_prompt": False}
    assert bytes(server.client.post("/tokenize", json=chat).json()["tokens"]) == b"<user>x"
    assert server.client.post("/tokenize", json={"prompt": ""}).json()["tokens"] == []
    back = server.client.post("/detokenize", json={"tokens": [*"h\u00e9".encode(), 257]}).json()
    assert back == {"prompt": "h\u00e9<|eos|>"}


def test_health_and_ready(server: ApiServer) -> None:
    assert server.client.get("/health").status_code == 200
    assert server.client.get("/ready").json() == {"status": "ready"}
    server.set(down=["decode"])
    assert server.client.get("/health").status_code == 200
    reply = server.client.get("/ready")
    assert (reply.status_code, reply.json()) == (503, {"status": "no decode group is up"})
    refused = server.ask()
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    server.set(down=[])
    assert server.client.get("/ready").status_code == 200


def test_request_ids_are_echoed_when_they_are_harmless(server: ApiServer) -> None:
    def echoed(given: str) -> str:
        headers = {"x-request-id": given.encode("latin-1")}
        return server.client.get("/health", headers=headers).headers["x-request-id"]

    assert echoed("abc-1.2:3_4") == "abc-1.2:3_4"
    for given in ("a b", "x" * 129, '"', "\u00e9"):
        assert re.fullmatch("[0-9a-f]{32}", echoed(given)), given


def test_every_request_is_a_line_in_the_log_without_its_text(server: ApiServer) -> None:
    reply = server.client.post(
        COMPLETIONS,
        json={"model": "tiny", "prompt": "private", "max_tokens": 3, "stream": True},
        headers={"x-request-id": "mine"},
    )
    [served] = until(lambda: lines_of(server, reply))  # a line is written behind the last byte of its reply
    unknown = server.client.get("/nope")
    [refused] = until(lambda: lines_of(server, unknown))
    assert served.pop("seconds") >= 0
    assert served == {
        "event": "request",
        "request_id": "mine",
        "method": "POST",
        "path": COMPLETIONS,
        "status": 200,
        "outcome": "ok",
        "prompt_tokens": 7,
        "tokens": 3,
    }
    assert (refused["status"], refused["outcome"]) == (404, "refused")
    assert refused["reason"] == "there is no route GET /nope"


def lines_of(server: ApiServer, reply: Any) -> list[dict[str, Any]]:
    """The log lines of one request: the line of an earlier one can come after its reply."""
    return [line for line in server.log.lines if line.get("request_id") == reply.headers["x-request-id"]]


@pytest.mark.parametrize("given", ["mine", None])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "prefix"), [(COMPLETIONS, "cmpl-"), (CHAT, "chatcmpl-")])
def test_log_reply_header_and_sessions_have_one_id(
    server: ApiServer, path: str, prefix: str, stream: bool, given: str | None
) -> None:
    server.log.lines.clear()  # "mine" is the id of several tests
    fields = body(path, max_tokens=2, stream=stream)
    reply = server.client.post(path, json=fields, headers={"x-request-id": given} if given else {})
    chunks = events(reply.text) if stream else [reply.json()]
    [line] = until(partial(lines_of, server, reply))
    ids = {chunk["id"] for chunk in chunks if isinstance(chunk, dict)}
    assert ids == {reply.headers["x-request-id"]} == {line["request_id"]}
    [found] = ids
    assert found == given or (given is None and re.fullmatch(prefix + "[0-9a-f]{32}", found))
    assert server.generator.calls[-1][0].startswith(found)
    assert server.client.get("/status").json()["recent"][0]["id"].startswith(found)


def test_running_requests_may_have_the_same_id(server: ApiServer) -> None:
    for _ in range(2):
        server.client.post(
            COMPLETIONS, json=body(COMPLETIONS, max_tokens=1), headers={"x-request-id": "same"}
        )
    first, second = (call[0] for call in server.generator.calls[-2:])
    assert first != second


@pytest.mark.parametrize(
    ("fields", "headers", "reason"),
    [
        ({"max_tokens": 0}, {}, "max_tokens"),
        ({"tools": [{}]}, {}, "tools"),
        ({"model": "a\nb\x1b[31m"}, {}, "the model 'a\\nb\\x1b[31m' is not served here"),
        ({}, {"x-request-timeout-s": "soon"}, "x-request-timeout-s: 'soon' is not a number"),
    ],
)
def test_a_refused_request_is_logged_with_the_reason(
    server: ApiServer, fields: dict[str, Any], headers: dict[str, str], reason: str
) -> None:
    server.log.lines.clear()
    reply = server.client.post(COMPLETIONS, json=body(COMPLETIONS, **fields), headers=headers)
    [line] = until(partial(lines_of, server, reply))
    assert line["reason"] == reply.json()["error"]["message"]
    assert reason in line["reason"]
    assert line["reason"].isprintable()


def test_a_broken_stream_is_logged_with_the_reason(server: ApiServer) -> None:
    server.log.lines.clear()
    server.set(error=DisaggError("no group left"), fail_after=1)
    server.ask(max_tokens=3, stream=True)
    [line] = until(lambda: server.log.lines)
    server.set(error=None)
    assert (line["outcome"], line["reason"]) == ("error", "no group left")


def test_metrics() -> None:
    with ApiServer() as server:
        server.ask(prompt="four", max_tokens=3, n=2)
        server.ask(max_tokens=0)
        server.set(error=ValueError("a bug"), fail_after=1)
        assert server.ask(max_tokens=3).status_code == 500
        server.generator.recoveries["prefill_lost"] += 2
        server.generator.suspicions["decode-2"] += 3
        server.generator.local_prefills["queue"] += 4
        server.generator.moved_prompts.update({"sooner": 5})
        server.generator.silent = ("decode-2",)
        text = server.client.get("/metrics").text
        status = server.client.get("/status").json()
        assert (status["recoveries_total"], status["suspected"]) == (2, ["decode-2"])
        assert status["moved_prompts_total"] == 5
    families = {family.name: family for family in text_string_to_metric_families(text)}
    values = {(s.name, *s.labels.values()): s.value for f in families.values() for s in f.samples}
    assert (
        values["disagg_recoveries_total", "prefill_lost"],
        values["disagg_recoveries_total", "decode_lost"],
    ) == (2, 0)
    assert values["disagg_suspicions_total", "decode-2"] == 3
    assert values["disagg_local_prefills_total", "queue"] == 4
    assert values["disagg_local_prefills_total", "no_prefill_group"] == 0
    assert values["disagg_moved_prompts_total", "sooner"] == 5
    assert values["disagg_requests_total", "ok"] == 1
    assert values["disagg_requests_total", "refused"] == 1
    assert values["disagg_requests_total", "error"] == 1
    assert values["disagg_errors_total", "internal"] == 1
    assert values["disagg_prompt_tokens_total",] == 10
    assert values["disagg_generated_tokens_total",] == 7
    assert values["disagg_time_to_first_token_seconds_count",] == 3
    assert values["disagg_inter_token_latency_seconds_count",] == 4
    assert values["disagg_queue_seconds_count",] == 3
    assert values["disagg_queue_seconds_sum",] >= 3 * 0.25, "with the time until memory was reserved"
    assert values["disagg_transfer_bytes_total",] == 3000
    assert values["disagg_transfer_seconds_sum",] == 1.5
    assert values["disagg_requests_running",] == values["disagg_requests_queued",] == 0
    assert values["disagg_aborts_total",] == 0
