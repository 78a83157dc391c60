"""`disagg serve` as users run it: its own process, Ray, UCX, two groups; spoken to with OpenAI's own client."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import httpx
import msgspec
import openai
import psutil
import pytest
import torch
from conditions import until
from serve_process import PROMPT, TOKENS, Served
from transformers import AutoModelForCausalLM

from disagg.core.config.read import Config, ModelConfig
from disagg.core.types import SamplingParams
from disagg.model.load.tiny import byte_tokenizer
from disagg.reference.answers import reference_answers


def test_a_completion_is_exact(served: Served, expected: list[int]) -> None:
    reply = served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=TOKENS, temperature=0, logprobs=3
    )
    [choice] = reply.choices
    assert choice.text == bytes(expected).decode()
    assert choice.finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.total_tokens == len(PROMPT) + TOKENS
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()) == choice.text
    tops = choice.logprobs.top_logprobs or []
    assert all(
        len(top) == 3 and max(top, key=top.__getitem__) == text
        for top, text in zip(tops, choice.text, strict=True)
    )


def test_prompts_of_many_lengths_are_exact_at_once(served: Served) -> None:
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(32, 127, (n,), generator=generator).tolist() for n in range(9, 9 + 37 * 5, 37)]
    config = Config(model=ModelConfig(path=str(served.checkpoint)))
    expected = reference_answers(config, prompts, SamplingParams(max_tokens=TOKENS), lambda: None).answers

    def answer(prompt: list[int]) -> Any:
        [choice] = served.client.completions.create(
            model="tiny",
            prompt=prompt,
            max_tokens=TOKENS,
            temperature=0,
            extra_body={"return_token_ids": True},
        ).choices
        return choice.token_ids  # type: ignore[attr-defined]

    with ThreadPoolExecutor(len(prompts)) as pool:
        assert list(pool.map(answer, prompts)) == expected


def test_the_wire_is_measured_at_start_and_said(served: Served) -> None:
    """One line for all prefill ranks that found the same."""
    logged = (json.loads(line) for line in served.log.read_text().splitlines() if line.startswith("{"))
    lines = [line for line in logged if line["event"] == "wire"]
    assert lines[0]["link"] == "prefill rank 0 to decode"
    assert len({(line["link"], line["chosen"]) for line in lines}) == len(lines) <= 2
    for line in lines:
        assert line["level"] == "info"
        assert line["path"] == "staging and ring, by ucx-shm"
        assert line["found"].startswith("measured: ")
    [key] = json.loads((served.home / ".cache" / "disagg" / "wire.json").read_text())["wires"]
    assert "cpu; ucx-shm; 1." in key


def test_a_router_imports_no_triton(served: Served) -> None:
    """Triton comes with torch's compiler and with the quantized layers; together their imports take 1.5 s."""

    def has_triton(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # Ray starts many short ones
            return any("libtriton" in one.path for one in process.memory_maps())
        return False

    server, *others = served.family()
    assert any(has_triton(one) for one in others), "ranks"
    assert not has_triton(server)


def test_a_stream_is_exact(served: Served, expected: list[int]) -> None:
    stream = served.client.completions.create(
        model="tiny",
        prompt=list(PROMPT.encode()),
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == bytes(expected).decode()
    assert len(chunks) == TOKENS + 1, "a chunk for each token, and the counts"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == TOKENS


def test_a_chat_whole_and_streamed(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    fields = {"model": "tiny", "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True}
    whole = served.client.chat.completions.create(**fields, top_logprobs=2)  # type: ignore[call-overload]
    stream = served.client.chat.completions.create(**fields, stream=True)  # type: ignore[call-overload]
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == whole.choices[0].finish_reason == "length"
    logprobs = whole.choices[0].logprobs.content
    assert bytes(byte for one in logprobs for byte in one.bytes).decode() == text
    assert {len(one.top_logprobs) for one in logprobs} == {2}


def test_the_groups_report_their_status(served: Served) -> None:
    """Over ZMQ and the ranks' processes: the reported bytes equal the bytes of the prompts."""

    key = {"authorization": f"Bearer {served.client.api_key}"}

    def status() -> dict[str, Any]:
        reply = httpx.get(f"{served.url}/status", headers=key, trust_env=False)
        found: dict[str, Any] = msgspec.json.decode(reply.content)
        return found

    def sent() -> int:
        ranks = [rank for group in status()["groups"] for rank in group.get("ranks", ())]
        return sum(route.get("bytes_total", 0) for rank in ranks for route in rank.get("routes", ()))

    def cached() -> int:
        return sum(
            group.get("cached_tokens_total", 0) for group in status()["groups"] if group["role"] == "decode"
        )

    alone = {"cache_salt": "unique"}  # so that all of it is sent
    served.client.completions.create(model="tiny", prompt=PROMPT, max_tokens=2, extra_body=alone)
    prompts = [len(PROMPT), *(answer["prompt_tokens"] for answer in status()["recent"][1:])]
    token_bytes = status()["recent"][0]["transfer_bytes"] // len(PROMPT)
    until(lambda: sent() == (sum(prompts) - cached()) * token_bytes)
    prefill, decode = status()["groups"]
    assert [rank["name"] for rank in prefill["ranks"]] == ["prefill r0", "prefill r1"]
    assert {route["target"] for rank in prefill["ranks"] for route in rank["routes"]} == {"decode r0"}
    assert len(decode["ranks"]) == 1
    until(lambda: status()["groups"][1]["ranks"][0]["landed_bytes_total"] == sent())
    assert served.metric('disagg_steps_total{group="prefill",role="prefill"}') >= len(prompts)


def test_several_answers_and_prompts(served: Served) -> None:
    def texts(n: int) -> list[str]:
        reply = served.client.completions.create(
            model="tiny", prompt=[PROMPT, "x"], n=n, seed=3, temperature=1.5, max_tokens=8
        )
        assert [choice.index for choice in reply.choices] == list(range(2 * n))
        return [choice.text for choice in reply.choices]

    three = texts(3)
    assert three == texts(3), "a seed repeats all of them"
    assert len(set(three)) == 6
    assert texts(1) == [three[0], three[3]]


def test_the_best_of_several_and_beams(served: Served) -> None:
    """Beams are those of transformers; the best of several is the likeliest of them."""
    more = {"use_beam_search": True, "early_stopping": True, "length_penalty": 0.5, "ignore_eos": True}
    found = served.client.completions.create(
        model="tiny", prompt=PROMPT, n=3, best_of=4, max_tokens=TOKENS, extra_body=more
    )
    model = AutoModelForCausalLM.from_pretrained(served.checkpoint, dtype=torch.float32)
    ids = torch.tensor([list(PROMPT.encode())])
    wanted = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=TOKENS,
        do_sample=False,
        num_beams=4,
        num_return_sequences=3,
        early_stopping=True,
        length_penalty=0.5,
        eos_token_id=None,
        pad_token_id=0,
    )
    texts = [byte_tokenizer().decode(one[len(PROMPT) :], skip_special_tokens=True) for one in wanted]
    assert [choice.text for choice in found.choices] == texts
    fields = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "seed": 3, "temperature": 1.5}
    every = served.client.completions.create(**fields, n=4, logprobs=0)  # type: ignore[call-overload]
    best = served.client.completions.create(**fields, n=1, best_of=4)  # type: ignore[call-overload]
    means = [sum(c.logprobs.token_logprobs) / len(c.logprobs.token_logprobs) for c in every.choices]
    assert best.choices[0].text == every.choices[means.index(max(means))].text


def test_stops(served: Served, expected: list[int]) -> None:
    text = bytes(expected).decode()
    reply = served.client.completions.create(
        model="tiny", prompt=PROMPT, max_tokens=TOKENS, temperature=0, stop=[text[4:6], "never there"]
    )
    assert (reply.choices[0].text, reply.choices[0].finish_reason) == (text[: text.index(text[4:6])], "stop")


def test_errors_are_openais(served: Served) -> None:
    create = served.client.completions.create
    with pytest.raises(openai.NotFoundError, match="gpt-9"):
        create(model="gpt-9", prompt="x")
    with pytest.raises(openai.BadRequestError, match="exceed the context of 2048 tokens") as long:
        create(model="tiny", prompt="x" * 3000)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="suffix is not supported"):
        create(model="tiny", prompt="x", suffix="y")
    with pytest.raises(openai.AuthenticationError):
        served.client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.InternalServerError) as late:
        create(
            model="tiny",
            prompt="x",
            max_tokens=2000,
            extra_body={"ignore_eos": True},
            extra_headers={"x-request-timeout-s": "0.3"},
        )
    assert late.value.status_code == 504


def test_a_client_that_leaves_frees_both_groups(served: Served) -> None:
    aborts = served.metric("disagg_aborts_total")
    stream = served.client.completions.create(
        model="tiny", prompt="x", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    left_s = time.monotonic()
    stream.close()
    until(lambda: served.metric("disagg_requests_running") == 0)
    assert time.monotonic() - left_s < 1.0, "until both groups have confirmed that nothing is left"
    assert served.metric("disagg_aborts_total") == aborts + 1
