"""A rank of a real `disagg serve` crashes and is replaced, no secret is anywhere, and a signal ends the server."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from conditions import PATIENCE_S, until
from secret_searches import SearchedServer, log_files
from serve_process import PROMPT, Served


def test_a_group_that_dies_is_replaced_and_its_stream_goes_on(served: Served, expected: list[int]) -> None:
    """The group that replaces it has the keys that `test_secrets_real.py` has rotated."""

    def ready() -> bool:
        return httpx.get(f"{served.url}/ready", trust_env=False).status_code == 200

    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 600, "temperature": 0}
    asked["extra_body"] = {"ignore_eos": True}
    [decode] = [rank for rank in served.family() if "DecodeActor" in " ".join(rank.cmdline())]
    stream = served.client.completions.create(**asked, stream=True)  # type: ignore[call-overload]
    first = next(iter(stream))
    decode.suspend()  # a fast machine computes a token in a millisecond: the answer must not end before the death
    decode.send_signal(signal.SIGABRT)  # a crash that writes all it can
    decode.resume()
    until(lambda: not ready())
    until(ready)
    text = first.choices[0].text + "".join(chunk.choices[0].text for chunk in stream)
    whole = served.client.completions.create(**asked)  # type: ignore[call-overload]
    assert whole.choices[0].finish_reason == "length"
    assert text == whole.choices[0].text
    assert text.startswith(bytes(expected).decode())
    assert "request_recovered" in served.log.read_text()
    assert served.metric('disagg_group_broken{group="prefill",role="prefill"}') == 0
    assert 'group="decode"' not in httpx.get(f"{served.url}/metrics", trust_env=False).text


def test_secrets_are_nowhere(place: SearchedServer) -> None:
    """Behind good and bad requests, a rotation of keys, and the crash of a rank, in the tests before and here."""
    url, keys = place.served.url, place.secrets
    assert place.complete().status_code == 200
    with httpx.Client(base_url=url, trust_env=False, timeout=PATIENCE_S) as client:
        good = {"authorization": f"Bearer {keys.variable_key}"}
        bodies: list[bytes] = []
        for headers in (good, {"authorization": f"Basic {keys.file_key}"}, {"x-api-key": keys.file_key}):
            for content in (
                b"{",
                b'{"model": "other", "prompt": "x"}',
                b'{"model": "tiny", "prompt": 1e999}',
            ):
                reply = client.post("/v1/completions", content=content, headers=headers)
                assert 400 <= reply.status_code < 500
                bodies.append(reply.content)
        bodies.append(client.get(f"/v1/models?api_key={keys.file_key}").content)
        paths = ("/status", "/metrics", "/health", "/", "/v1/models")
        bodies.extend(client.get(path, headers=good).content for path in paths)
    for body in bodies:
        keys.missing_from("a reply", body)
    until(lambda: bool(place.collector.received))
    for spans in place.collector.received:
        keys.missing_from("a span", spans)
    for process in place.family:
        keys.missing_from(f"the arguments of {process.pid}", "\0".join(process.cmdline()).encode())
    for child in place.family[1:]:
        with contextlib.suppress(FileNotFoundError):
            keys.missing_from(f"the environment of {child}", Path(f"/proc/{child.pid}/environ").read_bytes())
    files = [place.served.log, *log_files(place.session)]
    assert len(files) > 5, "Ray's log files are looked through too"
    for file in files:
        keys.missing_from(str(file), file.read_bytes())


def test_a_signal_ends_it_and_leaves_nothing(served: Served) -> None:
    """Last in this folder: the server is gone afterwards."""
    family = psutil.Process(served.process.pid).children(recursive=True)
    stream = served.client.completions.create(
        model="tiny", prompt="x", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    os.kill(served.process.pid, signal.SIGTERM)
    until(lambda: httpx.get(f"{served.url}/ready", trust_env=False).status_code == 503)
    with pytest.raises(openai.InternalServerError, match="stopping"):
        served.client.completions.create(model="tiny", prompt="x")
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length", "what ran has ended"
    assert served.process.wait(timeout=60) == 0
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
